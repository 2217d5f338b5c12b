/** What an empty conversation shows. */

import { el } from "./dom.js";

const STACK = `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()`;

const EXAMPLES = [
  [
    "Explain some code",
    "Copying is where drafts by lookup fly",
    `Show this class again, then explain in two sentences what it does.\n\n\`\`\`python\n${STACK}\n\`\`\``,
  ],
  [
    "Explain speculative decoding",
    "To someone who runs, in five sentences",
    "Explain speculative decoding to a long-distance runner, in five sentences.",
  ],
  [
    "Compare in a table",
    "Three ways to sort, with their costs",
    "Compare insertion sort, merge sort and quicksort in a small table: best case, worst case, " +
      "memory. Then say when to use which.",
  ],
  [
    "Plan a week",
    "Of dinners for two, as a list",
    "Plan seven simple vegetarian dinners for two as a list, and add a shopping list grouped by shelf.",
  ],
];

export function welcome(ask) {
  return el(
    "div",
    { class: "column welcome" },
    el("img", { src: "/page/icon.svg", alt: "" }),
    el("h1", {}, "Ready. Set. Ask."),
    el("p", {}, "A drafter runs ahead, the model checks.", el("br"), "You get exactly the model’s own words, sooner."),
    el(
      "div",
      { class: "examples" },
      EXAMPLES.map(([title, note, text]) =>
        el(
          "button",
          { type: "button", class: "example", on: { click: () => ask(text) } },
          el("strong", {}, title),
          el("span", {}, note),
        ),
      ),
    ),
  );
}
