/** The raw tokens of an answer, coloured by where they came from; those of one round stand together. */

import { el } from "./dom.js";
import { MixView } from "./mix_view.js";
import { sourceOf } from "./sources.js";
import { tokenCard } from "./token_card.js";
import { TokenTexts } from "./token_texts.js";

const AHEAD = 64; // tokens looked at to find the end of a character

export class DraftsView {
  /** `thinking`: 1 for the tokens of the thinking, 0 for those of the answer. */
  constructor(node, thinking) {
    Object.assign(this, { node, thinking });
    this.seen = 0; // of node.tokens
    this.mine = []; // indexes of those that are shown here, and not yet shown
    this.texts = new TokenTexts();
    this.counts = {};
    this.round = null;
    this.tokens = el("div", { class: "tokens" });
    this.mix = new MixView();
    this.root = el("div", { class: "drafts" }, thinking ? null : this.mix.root, this.tokens);
    tokenCard.watch(this.tokens, (span) => this.#about(span));
  }

  /** Adds what came since the last time. `over`: nothing more will come. */
  update(over) {
    const { tokens, content, reasoning } = this.node;
    for (; this.seen < tokens.length; this.seen += 1) {
      if (tokens[this.seen][3] === this.thinking) this.mine.push(this.seen);
    }
    let done = 0;
    while (done < this.mine.length) {
      const ahead = this.mine.slice(done, done + AHEAD).map((index) => tokens[index][0]);
      const shown = this.texts.next(ahead, this.thinking ? reasoning : content, over);
      if (!shown.length) break;
      for (const text of shown) this.#add(text, this.mine[done++]);
    }
    this.mine.splice(0, done);
    if (done) this.#count();
  }

  #count() {
    const all = Object.values(this.counts).reduce((sum, count) => sum + count, 0);
    const own = Object.entries(this.counts).filter(([name]) => sourceOf(name).key === "model");
    const drafted = own.reduce((left, [, count]) => left - count, all);
    const rounds = this.tokens.childElementCount;
    this.mix.update(this.counts, `${drafted} of ${all} tokens drafted · ${rounds} rounds`);
  }

  #add(text, index) {
    const [, source, round] = this.node.tokens[index];
    this.counts[source] = (this.counts[source] ?? 0) + 1;
    if (this.round !== round || !this.tokens.lastChild) this.tokens.append(el("span", { class: "round" }));
    this.round = round;
    const group = this.tokens.lastChild;
    group.classList.toggle("several", group.childElementCount > 0);
    // A line break is shown by a sign, so that a token of nothing else can be seen and pointed at.
    const parts = text.split("\n").flatMap((line, at) => (at ? [el("span", { class: "break" }, "\n"), line] : [line]));
    const name = text ? "token" : "token rest";
    group.append(el("span", { class: name, data: { source: sourceOf(source).key, index } }, parts));
  }

  #about(span) {
    const index = Number(span.dataset.index);
    const [, source, round] = this.node.tokens[index];
    const mates = this.node.tokens.map((token, at) => [token, at]).filter(([token]) => token[2] === round);
    return {
      source: sourceOf(source),
      round,
      place: mates.findIndex(([, at]) => at === index),
      sources: mates.map(([token]) => sourceOf(token[1])),
    };
  }
}
