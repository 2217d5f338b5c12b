/** The conversations: new, search, open, rename, delete, export, import. */

import { matches } from "./conversations.js";
import { el, iconButton, toast } from "./dom.js";
import { icon } from "./icons.js";

const DAY = 86_400_000;
const MAC = /Mac|iPhone|iPad/.test(navigator.platform);

export class SidebarView {
  constructor(root, chat, close) {
    Object.assign(this, { root, chat, close });
    this.query = el("input", {
      class: "input",
      type: "search",
      placeholder: "Search",
      "aria-label": "Search conversations",
      autocomplete: "off",
      on: { input: () => this.update() },
    });
    this.list = el("div", { class: "chats" });
    this.version = el("span", { class: "version" });
    this.file = el("input", {
      type: "file",
      accept: "application/json,.json",
      hidden: true,
      on: { change: () => this.#import() },
    });
    root.append(
      el(
        "div",
        { class: "sidebar-head" },
        el("span", { class: "brand" }, el("img", { src: "/page/icon.svg", alt: "" }), "forerun"),
        iconButton("sidebar", "Hide the sidebar", close),
      ),
      el(
        "div",
        { class: "sidebar-tools" },
        el(
          "button",
          { type: "button", class: "button new-chat", on: { click: () => chat.startNew() } },
          icon("plus"),
          "New chat",
          el("kbd", {}, MAC ? "⌘ K" : "Ctrl K"),
        ),
        el("div", { class: "search" }, icon("search"), this.query),
      ),
      this.list,
      el(
        "div",
        { class: "sidebar-foot" },
        el(
          "button",
          {
            type: "button",
            class: "quiet",
            title: "Save all conversations to a file",
            on: { click: () => this.#export() },
          },
          icon("export"),
          "Export",
        ),
        el(
          "button",
          {
            type: "button",
            class: "quiet",
            title: "Add conversations from a file",
            on: { click: () => this.file.click() },
          },
          icon("import"),
          "Import",
        ),
        this.file,
        this.version,
      ),
    );
    chat.addEventListener("list", () => this.update());
  }

  update() {
    if (this.list.querySelector("input")) return; // a title is being written
    const query = this.query.value.trim();
    const shown = this.chat.conversations.filter((conversation) => !query || matches(conversation, query));
    const groups = new Map();
    for (const conversation of shown) {
      const age = ageOf(conversation.updated);
      groups.set(age, [...(groups.get(age) ?? []), conversation]);
    }
    this.list.replaceChildren(
      ...[...groups].flatMap(([age, conversations]) => [
        el("h2", {}, age),
        el(
          "ul",
          {},
          conversations.map((conversation) => this.#row(conversation)),
        ),
      ]),
    );
    if (!shown.length)
      this.list.append(
        el("p", { class: "chats-none" }, query ? "Nothing found." : "Conversations stay in this browser."),
      );
  }

  #row(conversation) {
    const { chat } = this;
    const open = el(
      "button",
      {
        type: "button",
        class: "chat-open",
        title: conversation.title,
        on: { click: () => chat.open(conversation.id), dblclick: () => this.#rename(row, conversation) },
      },
      conversation.title,
    );
    const row = el(
      "li",
      {
        class: chat.runs.has(conversation.id) ? "chat-row running" : "chat-row",
        "aria-current": conversation === chat.current ? "true" : null,
      },
      open,
      el(
        "span",
        { class: "row-tools" },
        iconButton("edit", `Rename ${conversation.title}`, () => this.#rename(row, conversation), { class: "small" }),
        iconButton("trash", `Delete ${conversation.title}`, () => this.#remove(conversation), { class: "small" }),
      ),
    );
    return row;
  }

  #rename(row, conversation) {
    const field = el("input", { class: "input", value: conversation.title, "aria-label": "Title", maxlength: "200" });
    let over = false;
    const leave = (keep) => {
      if (over) return;
      over = true;
      field.remove();
      if (keep) this.chat.rename(conversation, field.value);
      this.update();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") leave(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        leave(false);
      }
    });
    field.addEventListener("blur", () => leave(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  #remove(conversation) {
    this.chat.remove(conversation);
    toast("Conversation deleted.", { word: "Undo", run: () => this.chat.restore(conversation) });
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.chat.exportAll()], { type: "application/json" }));
    const link = el("a", { href: url, download: `forerun-${new Date().toISOString().slice(0, 10)}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #import() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      const fresh = this.chat.importAll(await file.text());
      toast(`${fresh} conversation${fresh === 1 ? "" : "s"} added.`);
    } catch (error) {
      toast(error.message);
    }
  }
}

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "Last 7 days" : "Earlier";
}
