/** Shows markdown while it grows. Only blocks that changed are made anew: nothing flickers or loses a selection. */

import { blocks } from "./blocks.js";
import { codeBlock } from "./code_block.js";
import { el } from "./dom.js";
import { inline } from "./inline.js";

export class MarkdownView {
  constructor() {
    this.root = el("div", { class: "prose" });
    this.shown = []; // { key, block, node } of each block
    this.text = null;
  }

  update(text) {
    if (text === this.text) return;
    this.text = text;
    const wanted = blocks(text);
    wanted.forEach((block, index) => {
      const key = JSON.stringify(block);
      const old = this.shown[index];
      if (old?.key === key) return;
      if (old?.node.grow && block.type === "code" && block.language === old.block.language) {
        old.node.grow(block.text);
        this.shown[index] = { key, block, node: old.node };
        return;
      }
      const node = render(block);
      if (old) old.node.replaceWith(node);
      else this.root.append(node);
      this.shown[index] = { key, block, node };
    });
    for (const { node } of this.shown.splice(wanted.length)) node.remove();
  }
}

function render(block) {
  switch (block.type) {
    case "heading":
      return el(`h${block.level}`, {}, inline(block.text));
    case "code":
      return codeBlock(block.language, block.text);
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, block.blocks.map(render));
    case "list":
      return list(block);
    case "table":
      return table(block);
    default:
      return el("p", {}, inline(block.text));
  }
}

function list({ start, loose, items }) {
  const made = items.map(({ task, blocks: inside }) => {
    const box = task === null ? null : el("input", { type: "checkbox", disabled: true, checked: task });
    // In a list without blank lines, text stands in the item itself and not in a paragraph.
    const parts = inside.map((block) => (!loose && block.type === "paragraph" ? inline(block.text) : render(block)));
    return el("li", { class: task === null ? null : "task" }, box, parts.flat());
  });
  return start === null ? el("ul", {}, made) : el("ol", { start: start === 1 ? null : start }, made);
}

function table({ align, header, rows }) {
  const cell = (tag) => (text, column) => el(tag, { class: align[column] && `to-${align[column]}` }, inline(text));
  return el(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, header.map(cell("th")))),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, row.map(cell("td")))),
      ),
    ),
  );
}
