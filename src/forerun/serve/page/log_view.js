/** The conversation that is open, or a welcome. Follows a growing answer unless the reader has scrolled away. */

import { AnswerView } from "./answer_view.js";
import { announce, el } from "./dom.js";
import { proofWords } from "./proof.js";
import { QuestionView } from "./question_view.js";
import { tokenCard } from "./token_card.js";
import { Waiting } from "./waiting.js";

const NEAR = 48; // pixels from the end that count as the end

export class LogView {
  constructor(root, chat, look, welcome) {
    Object.assign(this, { root, chat, look, welcome });
    this.views = new WeakMap(); // of messages
    this.thread = el("div", { class: "column thread", role: "log", "aria-live": "off" });
    this.following = true;
    this.due = false;
    this.waiting = new Waiting(chat.server, () => this.#updateSoon(this.waiting.node));
    chat.addEventListener("open", () => this.#open());
    chat.addEventListener("answer", ({ detail }) => this.#grown(detail));
    look.addEventListener("change", () => this.#updateAll());
    root.addEventListener(
      "scroll",
      () => {
        tokenCard.hide();
        this.#scrolled();
      },
      { passive: true },
    );
    new ResizeObserver(() => this.#follow()).observe(this.thread);
  }

  /** Told when the end comes into view or leaves it. */
  onEnd(listener) {
    this.endListener = listener;
  }

  toEnd() {
    this.root.scrollTop = this.root.scrollHeight;
    this.#scrolled();
  }

  editLast() {
    const last = this.chat.path.findLast((node) => node.role === "user");
    if (last) this.#view(last).edit();
  }

  #open() {
    tokenCard.hide();
    const { path } = this.chat;
    if (!path.length) {
      this.root.replaceChildren(this.welcome());
      this.endListener?.(true);
      return;
    }
    const roots = path.map((node) => this.#view(node).root);
    // Nodes that stay are not moved: a selection or an open fold survives.
    const same = roots.findIndex((node, index) => this.thread.children[index] !== node);
    if (same >= 0 || this.thread.childElementCount !== roots.length) {
      const keep = same < 0 ? roots.length : same;
      while (this.thread.childElementCount > keep) this.thread.lastChild.remove();
      this.thread.append(...roots.slice(keep));
    }
    if (this.thread.parentElement !== this.root) this.root.replaceChildren(this.thread);
    this.#updateAll();
    this.waiting.watch(this.chat.run?.node ?? null);
    this.toEnd();
  }

  #grown(node) {
    if (!this.chat.path.includes(node)) return;
    this.#updateSoon(node);
    if (this.chat.run?.node === node) return;
    this.waiting.watch(null);
    this.#scrolled();
    const { following } = this;
    this.#updateAll();
    if (following) this.toEnd(); // to the figures, which come last
    if (node.proof) announce(proofWords(node.proof));
    else if (node.state === "done") announce("The answer is complete.");
    else announce(node.state === "stopped" ? "Stopped." : "The answer failed.");
  }

  /** At most once a frame, however many chunks come. */
  #updateSoon(node) {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      if (this.chat.path.includes(node)) this.#view(node).update();
      this.#follow();
    });
  }

  #updateAll() {
    for (const node of this.chat.path) this.#view(node).update();
    this.#follow();
  }

  #view(node) {
    let view = this.views.get(node);
    if (!view) {
      view =
        node.role === "user"
          ? new QuestionView(this.chat, node)
          : new AnswerView(this.chat, node, this.look, this.waiting);
      this.views.set(node, view);
    }
    return view;
  }

  #follow() {
    this.#scrolled();
    if (this.following && this.chat.run) this.root.scrollTop = this.root.scrollHeight;
    this.#scrolled();
  }

  /** Also asked before the end is followed: the browser tells of a reader's move only with its next frame. */
  #scrolled() {
    const left = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight;
    const atEnd = left < NEAR;
    // Growing text must not count as scrolling away: only a move upwards does.
    if (atEnd) this.following = true;
    else if (this.root.scrollTop < this.lastTop) this.following = false;
    this.lastTop = this.root.scrollTop;
    this.endListener?.(atEnd);
  }
}
