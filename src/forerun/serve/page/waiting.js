/** What an answer without tokens waits for, in words: the engine is asked now and then until the first token comes. */

import { seconds } from "./figures.js";

const PATIENCE = 500; // milliseconds before the engine is asked
const AGAIN = 1000;

export class Waiting {
  constructor(server, changed) {
    Object.assign(this, { server, changed });
    this.timer = null;
    this.node = null;
    this.text = "Sending";
  }

  /** Follows `node` until it has tokens; null: nobody waits. */
  watch(node) {
    if (node === this.node) return;
    clearTimeout(this.timer);
    this.node = node;
    this.since = performance.now();
    this.text = "Sending";
    if (node?.state === "waiting") this.timer = setTimeout(() => this.#look(node), PATIENCE);
  }

  async #look(node) {
    let text = "Waiting";
    try {
      const { waiting, status } = await this.server.stats();
      if (status === "loading") text = "The model is being loaded";
      // This answer counts among those that wait until its prompt is read.
      else text = waiting > 1 ? `Waiting · ${waiting - 1} more in the queue` : "Reading the prompt";
    } catch {
      // The answer itself will say what is wrong.
    }
    if (this.node !== node || node.state !== "waiting") return;
    const elapsed = (performance.now() - this.since) / 1000;
    this.text = elapsed < 2 ? text : `${text} · ${seconds(elapsed)}`;
    this.changed();
    this.timer = setTimeout(() => this.#look(node), AGAIN);
  }
}
