/** Small helpers that build nodes. Text always goes in as text: nothing here, or on the page, parses HTML. */

import { icon } from "./icons.js";

/**
 * An element. `props`: attributes, and `on` for listeners, `data` for the dataset. False and null leave an attribute
 * out. There is no `style` among them: the content security policy forbids it.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A button that shows an icon and says its name to those who cannot see it. */
export function iconButton(name, label, onclick, props = {}) {
  const { class: more = "", ...rest } = props;
  return el(
    "button",
    {
      type: "button",
      class: `icon-button ${more}`.trim(),
      title: label,
      "aria-label": label,
      on: { click: onclick },
      ...rest,
    },
    icon(name),
  );
}

/** Says something to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A line at the foot of the page that goes away by itself; `action` is a word and what it does. */
export function toast(text, action = null) {
  const note = el("div", { class: "toast" }, el("span", {}, text));
  const leave = setTimeout(() => note.remove(), action ? 7000 : 3500);
  if (action) {
    note.append(
      el(
        "button",
        {
          type: "button",
          on: {
            click: () => {
              clearTimeout(leave);
              note.remove();
              action.run();
            },
          },
        },
        action.word,
      ),
    );
  }
  document.getElementById("toasts").append(note);
}

/** Copies text and shows it on the button for a moment. Where the clipboard is closed (http), the old way. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "unseen", value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) return toast("The browser did not allow copying.");
  }
  announce("Copied");
  if (button.dataset.copied) return undefined;
  button.dataset.copied = "yes";
  const before = button.querySelector(".icon");
  const done = icon("check");
  before.replaceWith(done);
  setTimeout(() => {
    done.replaceWith(before);
    delete button.dataset.copied;
  }, 1500);
  return undefined;
}
