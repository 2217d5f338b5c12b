/** A block of code with its language, light colours and a button that copies it. */

import { copyText, el } from "./dom.js";
import { icon } from "./icons.js";
import { highlight } from "./highlight.js";

export function codeBlock(language, text) {
  const code = el("code", {}, highlight(language, text));
  const copy = el(
    "button",
    { type: "button", class: "copy", on: { click: () => copyText(code.textContent, copy) } },
    icon("copy"),
    "Copy",
  );
  const node = el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0" }, code),
  );
  node.grow = (longer) => code.replaceChildren(...highlight(language, longer));
  return node;
}
