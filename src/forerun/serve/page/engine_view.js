/** The engine, live: asked every second while it is open and the page can be seen. */

import { el } from "./dom.js";
import { short } from "./figures.js";
import { MixView } from "./mix_view.js";
import { drafterName } from "./sources.js";
import { Sparkline } from "./sparkline.js";

const EVERY = 1000;

export class EngineView {
  /** `told(state)`: hears every state; null when the server is away. */
  constructor(root, server, told) {
    Object.assign(this, { root, server, told });
    this.speed = tile("Tokens per second", new Sparkline());
    this.accepted = tile("Drafts accepted", new Sparkline(1));
    this.perRound = tile("Tokens per round", new Sparkline(1));
    this.requests = tile("Answers running", new Sparkline(2));
    this.cacheBar = el("i");
    this.cache = tile("Cache in use", { root: el("div", { class: "meter" }, this.cacheBar) });
    this.mix = new MixView();
    const arms = el("div", { class: "tile" }, el("div", { class: "tile-name" }, "Rounds by drafter"), this.mix.root);
    this.tiles = el(
      "div",
      { class: "tiles" },
      this.speed.root,
      this.accepted.root,
      this.perRound.root,
      this.requests.root,
      this.cache.root,
      arms,
    );
    this.problem = el("div", { class: "engine-problem", role: "status", hidden: true });
    root.append(this.tiles, this.problem);
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  get open() {
    return !this.root.hidden;
  }

  show(open) {
    if (open === this.open) return;
    this.root.hidden = !open;
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.timer);
    if (this.open && !document.hidden) this.timer = setTimeout(() => this.#ask(), delay);
  }

  async #ask() {
    try {
      const state = await this.server.stats(AbortSignal.timeout(5000));
      this.#say((state.warnings ?? []).join(" "));
      this.#draw(state);
      this.told(state);
    } catch (error) {
      this.#say(error.status === 401 ? "The server wants a key for this." : error.message);
      this.told(null);
    }
    this.#schedule(EVERY);
  }

  /** What is wrong, if anything is. */
  #say(text) {
    this.problem.hidden = !text;
    if (this.problem.textContent !== text) this.problem.textContent = text; // or it would be read out again
  }

  #draw(state) {
    this.speed.draw(state.tokens_per_second, short(state.tokens_per_second));
    this.accepted.draw(
      state.accepted_share,
      state.accepted_share === null ? "–" : `${Math.round(100 * state.accepted_share)}`,
      state.accepted_share === null ? "" : " %",
    );
    this.perRound.draw(
      state.tokens_per_round,
      state.tokens_per_round === null ? "–" : state.tokens_per_round.toFixed(2),
    );
    this.requests.draw(state.running + state.waiting, `${state.running}`, ` · ${state.waiting} waiting`);
    this.cache.draw(null, `${Math.round(100 * state.cache_usage)}`, " %");
    this.cacheBar.style.width = `${100 * Math.min(1, state.cache_usage)}%`;
    const arms = Object.entries(state.arms).map(([arm, rounds]) => [drafterName(arm), rounds]);
    const used = arms.some(([, rounds]) => rounds > 0);
    this.mix.root.hidden = !used;
    if (used) this.mix.update(Object.fromEntries(arms));
  }
}

function tile(name, more) {
  const value = el("div", { class: "tile-value" }, "–");
  const root = el(
    "div",
    { class: "tile" },
    el("div", { class: "tile-name" }, name),
    value,
    el("div", { class: "tile-more" }, more.root),
  );
  const draw = (number, text, unit = "") => {
    value.replaceChildren(text, el("small", {}, unit));
    more.add?.(number);
  };
  return { root, draw };
}
