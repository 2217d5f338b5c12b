/** Where questions are written: one field, files that go with it, one button that sends or stops. */

import { AttachingView } from "./attaching_view.js";
import { el } from "./dom.js";
import { icon } from "./icons.js";

export class ComposerView {
  constructor(root, chat, log) {
    Object.assign(this, { chat, log });
    this.drafts = new Map(); // half-written questions, by conversation
    this.text = el("textarea", {
      id: "prompt",
      rows: "1",
      placeholder: "Ask anything",
      "aria-label": "Message",
      autocomplete: "off",
      enterkeyhint: "send",
      on: {
        input: () => this.update(),
        keydown: (event) => this.#key(event),
        paste: (event) => this.attaching.take(event, event.clipboardData),
      },
    });
    this.attaching = new AttachingView(() => this.update());
    this.button = el("button", {
      type: "button",
      class: "send",
      on: { click: () => (chat.run ? chat.stop() : this.send()) },
    });
    const end = el(
      "button",
      {
        type: "button",
        class: "to-end",
        hidden: true,
        "aria-label": "Go to the end",
        title: "Go to the end",
        on: { click: () => log.toEnd() },
      },
      icon("down"),
    );
    log.onEnd((atEnd) => {
      end.hidden = atEnd;
    });
    root.append(
      end,
      el(
        "div",
        {
          class: "composer-box",
          on: {
            click: (event) => {
              if (event.target === event.currentTarget) this.text.focus();
            },
          },
        },
        this.attaching.strip,
        this.attaching.clip,
        this.attaching.file,
        this.text,
        this.button,
      ),
      el(
        "div",
        { class: "composer-hint" },
        "Enter sends · Shift Enter for a new line · Esc stops · ↑ edits your last question",
      ),
    );
    for (const type of ["open", "list", "answer"]) chat.addEventListener(type, () => this.update());
    chat.addEventListener("open", () => this.#opened());
    this.update();
  }

  focus() {
    this.text.focus();
  }

  /** Is there nothing to send, or not yet all of it? */
  get unready() {
    return (!this.text.value.trim() && !this.attaching.media.length) || this.attaching.reading > 0;
  }

  update() {
    const stops = this.chat.run !== null;
    if (this.stops !== stops) {
      this.stops = stops;
      this.button.classList.toggle("stop", stops);
      this.button.replaceChildren(icon(stops ? "stop" : "send"));
      this.button.title = stops ? "Stop (Esc)" : "Send (Enter)";
      this.button.setAttribute("aria-label", stops ? "Stop" : "Send");
    }
    this.button.disabled = !stops && this.unready;
  }

  send() {
    if (this.chat.run || this.unready) return;
    const text = this.text.value;
    const { media } = this.attaching;
    this.text.value = "";
    this.attaching.show([]);
    this.chat.ask(text, null, media);
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.text.value && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.log.editLast();
    }
  }

  /** A half-written question stays with its conversation. */
  #opened() {
    const { id } = this.chat.current;
    if (id === this.shown) return;
    if (this.shown) this.drafts.set(this.shown, { text: this.text.value, media: this.attaching.media });
    this.shown = id;
    const { text, media } = this.drafts.get(id) ?? { text: "", media: [] };
    this.text.value = text;
    this.attaching.open(id, media);
    if (matchMedia("(hover: hover)").matches) this.focus();
  }
}
