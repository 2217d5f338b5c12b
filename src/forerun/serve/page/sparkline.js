/** A small line of the last values. */

import { svg } from "./icons.js";

const WIDTH = 120;
const HEIGHT = 24;
const LENGTH = 40; // values, one a second

export class Sparkline {
  /** `top`: the least value the full height stands for. */
  constructor(top = 0) {
    this.top = top;
    this.values = [];
    this.line = svg("path", { class: "line" });
    this.area = svg("path", { class: "area" });
    this.root = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.line,
    );
  }

  add(value) {
    this.values.push(value ?? 0);
    if (this.values.length > LENGTH) this.values.shift();
    const top = Math.max(this.top, ...this.values) || 1;
    const step = WIDTH / (LENGTH - 1);
    const start = WIDTH - step * (this.values.length - 1);
    const points = this.values.map(
      (each, index) =>
        `${(start + step * index).toFixed(1)} ${(HEIGHT - 1.5 - (HEIGHT - 3) * (each / top)).toFixed(1)}`,
    );
    const path = `M${points.join("L")}`;
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}L${WIDTH} ${HEIGHT}L${start.toFixed(1)} ${HEIGHT}Z`);
  }
}
