/** Shares of the sources as one bar with a legend. */

import { el } from "./dom.js";
import { mixOf } from "./sources.js";

export class MixView {
  constructor() {
    this.bar = el("div", { class: "mix-bar", "aria-hidden": "true" });
    this.legend = el("ul", { class: "legend" });
    this.root = el("div", { class: "mix" }, this.bar, this.legend);
  }

  /** `closing`: a last word at the end of the legend. */
  update(counts, closing = null) {
    const mix = mixOf(counts);
    const whole = mix.reduce((sum, [, count]) => sum + count, 0);
    this.bar.replaceChildren(
      ...mix.map(([source, count]) => {
        const part = el("i", { data: { source: source.key } });
        part.style.flexGrow = count;
        return part;
      }),
    );
    this.legend.replaceChildren(
      ...mix.map(([source, count]) =>
        el(
          "li",
          { data: { source: source.key } },
          source.name,
          " ",
          el("b", {}, `${Math.round((100 * count) / whole)} %`),
        ),
      ),
    );
    if (closing) this.legend.append(el("li", { class: "whole" }, closing));
  }
}
