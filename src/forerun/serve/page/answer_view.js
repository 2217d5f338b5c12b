/** One answer: thinking, text or coloured tokens, what went wrong, and the line of figures. */

import { branchSwitch } from "./branch_switch.js";
import { copyText, el, iconButton } from "./dom.js";
import { icon } from "./icons.js";
import { DraftsView } from "./drafts_view.js";
import { answerDetails, answerFigures, liveFigures } from "./figures.js";
import { MarkdownView } from "./markdown.js";
import { proofFigure, proofNotice } from "./proof.js";
import { ThinkingView } from "./thinking_view.js";

const NOTICES = {
  stopped: "Stopped.",
  interrupted: "The page was closed before this answer was complete.",
  length: "Cut off: the limit of tokens was reached.",
};

export class AnswerView {
  /** `waiting`: tells in words what an answer without tokens waits for. */
  constructor(chat, node, look, waiting) {
    Object.assign(this, { chat, node, look, waiting });
    this.firstToken = null;
    this.state = el(
      "div",
      { class: "state", hidden: true },
      el("span", { class: "runner", "aria-hidden": "true" }, el("i"), el("i"), el("i")),
      el("span", { class: "state-text" }),
    );
    this.thinking = new ThinkingView(node);
    this.markdown = new MarkdownView();
    this.drafts = null; // made when it is first looked at
    this.body = el("div", { class: "answer-body" }, this.markdown.root);
    this.after = el("div", {});
    this.foot = el("div", { class: "answer-foot" });
    this.root = el(
      "article",
      { class: "message assistant", "aria-label": "Answer" },
      this.state,
      this.thinking.root,
      this.body,
      this.after,
      this.foot,
    );
  }

  update() {
    const { node } = this;
    const live = node.state === "waiting" || node.state === "streaming";
    const coloured = this.look.values.drafts && node.tokens.length > 0;
    this.root.setAttribute("aria-busy", String(live));
    this.state.hidden = node.state !== "waiting";
    if (!this.state.hidden) this.state.lastChild.textContent = this.waiting.text;
    this.thinking.update(live && !node.content, coloured);
    this.markdown.root.classList.toggle("live", live && Boolean(node.content));
    if (coloured) {
      this.drafts ??= new DraftsView(node, 0);
      this.drafts.update(!live);
    } else this.markdown.update(node.content);
    const shown = coloured ? this.drafts.root : this.markdown.root;
    if (this.body.firstChild !== shown) this.body.replaceChildren(shown);
    if (node.state === "streaming") this.firstToken ??= performance.now();
    this.#after();
    this.#foot(live);
  }

  #after() {
    const { error, state, finish, proof } = this.node;
    const key = JSON.stringify([error, state, finish, proof]);
    if (this.afterKey === key) return; // or an error would be read out again
    this.afterKey = key;
    const parts = [];
    if (state === "error") parts.push(this.#problem(error));
    const notice = NOTICES[state] ?? NOTICES[finish];
    if (notice) parts.push(el("p", { class: "notice" }, notice));
    const unproved = proofNotice(this.node);
    if (unproved) parts.push(unproved);
    this.after.replaceChildren(...parts);
  }

  #problem({ message, param, retryAfter }) {
    const more = [param ? ` (${param})` : "", retryAfter ? ` Try again in ${retryAfter} s.` : ""].join("");
    return el(
      "div",
      { class: "problem", role: "alert" },
      icon("warning"),
      el("p", {}, message + more),
      el(
        "button",
        { type: "button", class: "button", on: { click: () => this.chat.regenerate(this.node) } },
        icon("again"),
        "Retry",
      ),
    );
  }

  #foot(live) {
    const { node, chat } = this;
    if (live) {
      const figures = node.tokens.length
        ? liveFigures(node.tokens.length, (performance.now() - this.firstToken) / 1000)
        : [];
      this.foot.replaceChildren(el("div", { class: "message-tools" }), el("div", { class: "figures" }, figures));
      return;
    }
    const busy = chat.run !== null;
    const key = JSON.stringify([
      node.state,
      busy,
      node.proof,
      chat.current.leaf,
      Object.keys(chat.current.nodes).length,
    ]);
    if (this.footKey === key) return; // keeps a focused button
    this.footKey = key;
    const copy = node.content
      ? iconButton("copy", "Copy this answer", () => copyText(node.content, copy), { class: "small" })
      : null;
    const tools = el(
      "div",
      { class: "message-tools" },
      copy,
      node.state !== "error" &&
        iconButton("again", "Answer again", () => chat.regenerate(node), { class: "small", disabled: busy }),
      branchSwitch(chat, node),
    );
    const figures =
      node.statistics &&
      el(
        "div",
        { class: "figures", title: answerDetails(node.statistics) },
        answerFigures(node.statistics, node.proof),
        proofFigure(chat, node),
      );
    this.foot.replaceChildren(tools, ...(figures ? [figures] : []));
  }
}
