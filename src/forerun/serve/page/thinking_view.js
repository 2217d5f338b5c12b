/** What a model thought before it answered, folded away; the summary says how long and how much. */

import { el } from "./dom.js";
import { icon } from "./icons.js";
import { DraftsView } from "./drafts_view.js";
import { seconds } from "./figures.js";
import { MarkdownView } from "./markdown.js";

export class ThinkingView {
  constructor(node) {
    this.node = node;
    this.label = el("span", { class: "label" });
    this.markdown = new MarkdownView();
    this.drafts = null;
    this.body = el("div", { class: "thinking-body" }, this.markdown.root);
    this.root = el(
      "details",
      { class: "thinking", hidden: true, on: { toggle: () => this.#fill() } },
      el("summary", {}, icon("right"), this.label),
      this.body,
    );
  }

  update(live, coloured) {
    const { node } = this;
    this.root.hidden = !node.reasoning;
    if (!node.reasoning) return;
    Object.assign(this, { live, coloured });
    this.root.classList.toggle("live", live);
    const time = node.reasoningSeconds === null ? "" : `${live ? " " : " for "}${seconds(node.reasoningSeconds)}`;
    const tokens = node.statistics?.reasoningTokens ?? node.tokens.filter((token) => token[3]).length;
    this.label.textContent = `${live ? "Thinking" : "Thought"}${time}${tokens ? ` · ${tokens} tokens` : ""}`;
    this.#fill();
  }

  /** Only where it can be seen. */
  #fill() {
    if (!this.root.open) return;
    const atEnd = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 24;
    if (this.coloured) {
      this.drafts ??= new DraftsView(this.node, 1);
      this.drafts.update(!this.live);
    } else this.markdown.update(this.node.reasoning);
    const shown = this.coloured ? this.drafts.root : this.markdown.root;
    if (this.body.firstChild !== shown) this.body.replaceChildren(shown);
    if (atEnd && this.live) this.body.scrollTop = this.body.scrollHeight;
  }
}
