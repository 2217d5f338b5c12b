/** Attaching files to a question: a paper clip, pasting, dropping anywhere on the page; and what is attached so far. */

import { acceptedTypes, kindOf, readAttachment, readKinds } from "./attachments.js";
import { attachmentStrip } from "./attachments_view.js";
import { el, iconButton, toast } from "./dom.js";

export class AttachingView {
  /** `changed` is told when something was attached or removed. Put `strip`, `clip` and `file` into the page. */
  constructor(changed) {
    this.changed = changed;
    this.media = [];
    this.reading = 0; // files on their way
    this.owner = null; // the conversation that they are attached to
    this.kinds = []; // of files that the model reads
    this.largest = Infinity; // bytes of a file
    this.strip = el("div", { class: "attached", hidden: true });
    this.file = el("input", {
      type: "file",
      class: "unseen",
      multiple: true,
      tabindex: "-1",
      "aria-hidden": "true",
      on: {
        change: () => {
          this.#attach([...this.file.files]);
          this.file.value = "";
        },
      },
    });
    this.clip = iconButton("clip", "Attach files", () => this.file.click(), { class: "attach", hidden: true });
    this.#takeDrops();
  }

  /** What the server told: only what the model reads can be attached. */
  know(props) {
    this.kinds = readKinds(props);
    this.largest = 0.7 * (props.settings?.max_body ?? Infinity); // as text in a body it takes a third more
    this.clip.hidden = !this.kinds.length;
    this.file.setAttribute("accept", acceptedTypes(this.kinds));
  }

  /** Another conversation, and what is attached to it. */
  open(owner, media) {
    this.owner = owner;
    this.show(media);
  }

  /** Shows these, and nothing else. */
  show(media) {
    this.media = media;
    this.strip.hidden = !media.length;
    this.strip.replaceChildren(attachmentStrip(media, (one) => this.show(this.media.filter((other) => other !== one))));
    this.changed();
  }

  /** Files of a clipboard or a drop; anything else goes its usual way. */
  take(event, data) {
    const files = [...(data?.files ?? [])];
    if (!files.length || !this.kinds.length) return;
    event.preventDefault();
    this.#attach(files);
  }

  async #attach(files) {
    const { owner } = this;
    this.#count(files.length);
    for (const file of files) {
      try {
        const read = await this.#read(file);
        if (this.owner !== owner) throw new Error(`${file.name} was not attached: another chat was opened meanwhile.`);
        this.show([...this.media, read]);
      } catch (error) {
        toast(error.message);
      } finally {
        this.#count(-1);
      }
    }
  }

  #count(more) {
    this.reading += more;
    this.changed();
  }

  #read(file) {
    if (this.kinds.includes("image") && file.type.startsWith("image/") && !kindOf(file.type))
      throw new Error(`${file.name} is not a picture in PNG, JPEG, WebP, GIF or BMP format.`);
    if (!this.kinds.includes(kindOf(file.type)))
      throw new Error(`${file.name}: this model reads ${this.kinds.join(", ")} only.`);
    if (file.size > this.largest) throw new Error(`${file.name} is too large for this server.`);
    return readAttachment(file);
  }

  #takeDrops() {
    const holds = (event) => this.kinds.length > 0 && [...(event.dataTransfer?.types ?? [])].includes("Files");
    const mark = (on) => this.strip.parentElement.classList.toggle("dropping", on);
    addEventListener("dragover", (event) => {
      if (!holds(event)) return;
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) mark(false);
    });
    addEventListener("drop", (event) => {
      mark(false);
      this.take(event, event.dataTransfer);
    });
  }
}
