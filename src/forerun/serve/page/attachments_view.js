/** Attached files: pictures as thumbnails, films and recordings by their names. */

import { el, iconButton } from "./dom.js";
import { icon } from "./icons.js";

const ICONS = { video: "film", audio: "sound" };

/** `remove(attachment)`: with it each can be taken away. */
export function attachmentStrip(media, remove = null) {
  return el("div", { class: "attachments" }, media.map((one) => attachment(one, remove)));
}

function attachment(one, remove) {
  const shown =
    one.kind === "image"
      ? el("img", { src: one.url, alt: one.name, title: one.name })
      : el("span", { class: "attached-file", title: one.name }, icon(ICONS[one.kind]), el("span", {}, one.name));
  const button = remove && iconButton("close", `Remove ${one.name}`, () => remove(one), { class: "small" });
  return el("div", { class: "attachment" }, shown, button);
}
