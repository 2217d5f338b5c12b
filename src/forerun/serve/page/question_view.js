/** One question, which can be copied and edited: the edited one becomes another branch. */

import { attachmentStrip } from "./attachments_view.js";
import { branchSwitch } from "./branch_switch.js";
import { copyText, el, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** Only where there is code: elsewhere people mean the characters they type. */
function markdownBubble(text) {
  const view = new MarkdownView();
  view.update(text);
  return el("div", { class: "bubble formatted" }, view.root);
}

export class QuestionView {
  constructor(chat, node) {
    Object.assign(this, { chat, node });
    this.bubble = node.content.includes("```")
      ? markdownBubble(node.content)
      : el("div", { class: "bubble" }, node.content);
    this.tools = el("div", { class: "message-tools" });
    this.media = node.media?.length ? attachmentStrip(node.media) : null;
    this.root = el("article", { class: "message user", "aria-label": "Question" }, ...this.#shown());
  }

  #shown() {
    return [this.media, this.node.content ? this.bubble : null, this.tools].filter(Boolean);
  }

  update() {
    if (this.editing) return;
    const { chat, node } = this;
    const key = JSON.stringify([chat.run !== null, Object.keys(chat.current.nodes).length, chat.current.leaf]);
    if (this.toolsKey === key) return; // keeps a focused button
    this.toolsKey = key;
    const branches = branchSwitch(chat, node);
    const copy = iconButton("copy", "Copy this question", () => copyText(node.content, copy), { class: "small" });
    const edit = iconButton("edit", "Edit this question", () => this.edit(), {
      class: "small edit-question",
      disabled: chat.run !== null,
    });
    this.tools.classList.toggle("branched", branches !== null);
    this.tools.replaceChildren(copy, edit, ...(branches ? [branches] : []));
  }

  edit() {
    if (this.chat.run || this.editing) return;
    this.editing = true;
    const text = el("textarea", { rows: "2", "aria-label": "Edit the question", value: this.node.content });
    const leave = () => {
      this.editing = false;
      this.root.replaceChildren(...this.#shown());
      this.update();
    };
    const send = () => {
      if ((!text.value.trim() && !this.media) || this.chat.run) return;
      leave();
      this.chat.ask(text.value, this.node, this.node.media);
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
      if (event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation();
        leave();
        document.getElementById("prompt").focus();
      }
    });
    this.root.replaceChildren(
      ...(this.media ? [this.media] : []),
      el(
        "div",
        { class: "editor" },
        text,
        el(
          "div",
          { class: "editor-tools" },
          el("span", {}, "The first version stays as a branch."),
          el("button", { type: "button", class: "button", on: { click: leave } }, "Cancel"),
          el("button", { type: "button", class: "button primary", on: { click: send } }, "Send"),
        ),
      ),
    );
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  }
}
