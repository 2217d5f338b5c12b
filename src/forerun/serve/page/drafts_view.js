/** The raw tokens of an answer, coloured by where they came from; those of one round stand together. */

import { el } from "./dom.js";
import { MixView } from "./mix_view.js";
import { sourceOf } from "./sources.js";
import { tokenCard } from "./token_card.js";

export class DraftsView {
  /** `thinking`: 1 for the tokens of the thinking, 0 for those of the answer. */
  constructor(node, thinking) {
    Object.assign(this, { node, thinking });
    this.seen = 0; // of node.tokens
    this.counts = {};
    this.round = null;
    this.tokens = el("div", { class: "tokens" });
    this.mix = new MixView();
    this.root = el("div", { class: "drafts" }, thinking ? null : this.mix.root, this.tokens);
    tokenCard.watch(this.tokens, (span) => this.#about(span));
  }

  /** Adds what came since the last time. */
  update() {
    const { tokens } = this.node;
    if (this.seen === tokens.length) return;
    for (; this.seen < tokens.length; this.seen += 1) {
      const [text, source, round, thinking] = tokens[this.seen];
      if (thinking === this.thinking) this.#add(text, source, round);
    }
    const drafted = Object.entries(this.counts).reduce(
      (sum, [name, count]) => sum + (sourceOf(name).key === "model" ? 0 : count),
      0,
    );
    const rounds = this.tokens.childElementCount;
    this.mix.update(
      this.counts,
      rounds
        ? `${drafted} of ${this.tokens.querySelectorAll(".token").length} tokens drafted · ${rounds} rounds`
        : null,
    );
  }

  #add(text, source, round) {
    this.counts[source] = (this.counts[source] ?? 0) + 1;
    if (this.round !== round || !this.tokens.lastChild) this.tokens.append(el("span", { class: "round" }));
    this.round = round;
    const group = this.tokens.lastChild;
    group.classList.toggle("several", group.childElementCount > 0);
    // A line break is shown by a sign, so that a token of nothing else can be seen and pointed at.
    const parts = text
      .split("\n")
      .flatMap((line, index) => (index ? [el("span", { class: "break" }, "\n"), line] : [line]));
    group.append(el("span", { class: "token", data: { source: sourceOf(source).key, index: this.seen } }, parts));
  }

  #about(span) {
    const index = Number(span.dataset.index);
    const [text, source, round] = this.node.tokens[index];
    const mates = this.node.tokens.map((token, at) => [token, at]).filter(([token]) => token[2] === round);
    return {
      text,
      source: sourceOf(source),
      round,
      place: mates.findIndex(([, at]) => at === index),
      sources: mates.map(([token]) => sourceOf(token[1])),
    };
  }
}
