/** The small card beside a token: its round, where it came from, which of the round's tokens it is. */

import { el } from "./dom.js";

class TokenCard {
  constructor() {
    this.root = el("div", { class: "token-card", role: "tooltip", hidden: true });
    this.span = null;
  }

  /** Shows the card for tokens inside `container`, by mouse, pen or finger. */
  watch(container, about) {
    container.addEventListener("pointerover", (event) => this.#at(event.target.closest(".token"), about));
    container.addEventListener("pointerleave", () => this.hide());
    container.addEventListener("click", (event) => this.#at(event.target.closest(".token"), about));
  }

  hide() {
    this.root.hidden = true;
    this.#hold(null);
  }

  #at(span, about) {
    if (!span) return this.hide();
    const { source, round, place, sources } = about(span);
    this.root.dataset.source = source.key;
    this.root.replaceChildren(
      el("div", { class: "where" }, source.name),
      el(
        "p",
        {},
        round === 0 ? "Came with the prompt's own pass" : `Round ${round} · token ${place + 1} of ${sources.length}`,
      ),
      el("p", {}, source.story),
      sources.length < 2
        ? null
        : el(
            "div",
            { class: "steps", "aria-hidden": "true" },
            sources.map((other, index) =>
              el("i", { class: index === place ? "here" : null, data: { source: other.key } }),
            ),
          ),
    );
    if (!this.root.isConnected) document.body.append(this.root);
    this.root.hidden = false;
    this.#hold(span);
    this.#place(span.getClientRects()[0]);
    return undefined;
  }

  /** Marks the token and its round: a finger has no hover. */
  #hold(span) {
    for (const node of [this.span, this.span?.parentElement]) node?.classList.remove("held");
    this.span = span;
    for (const node of [span, span?.parentElement]) node?.classList.add("held");
  }

  /** Above the token where there is room, else below; never beyond the edge. */
  #place(token) {
    const card = this.root.getBoundingClientRect();
    const left = Math.max(8, Math.min(token.left + token.width / 2 - card.width / 2, innerWidth - card.width - 8));
    const above = token.top - card.height - 8;
    this.root.style.left = `${left}px`;
    this.root.style.top = `${above > 8 ? above : token.bottom + 8}px`;
  }
}

/** One for the whole page. */
export const tokenCard = new TokenCard();
