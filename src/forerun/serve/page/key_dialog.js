/** Asks for the API key. It stays in this tab's sessionStorage and nowhere else. */

import { el } from "./dom.js";

/** The key, or null when the user has none. `wasWrong`: there was one, and the server refused it. */
export function askForKey(wasWrong) {
  return new Promise((resolve) => {
    const field = el("input", {
      class: "input",
      type: "password",
      id: "api-key",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": "api-key-note",
    });
    const dialog = el(
      "dialog",
      { class: "dialog narrow", "aria-labelledby": "key-title" },
      el("div", { class: "dialog-head" }, el("h2", { id: "key-title" }, "This server wants a key")),
      el(
        "div",
        { class: "dialog-body" },
        el(
          "label",
          { class: "field" },
          el("span", { class: "field-label" }, "API key"),
          field,
          el(
            "span",
            { class: wasWrong ? "field-note wrong" : "field-note", id: "api-key-note" },
            wasWrong
              ? "The server did not accept that key."
              : "It was given to the server with --api-key or FORERUN_API_KEY. It stays in this tab.",
          ),
        ),
      ),
      el(
        "div",
        { class: "dialog-foot" },
        el("button", { type: "button", class: "button", on: { click: () => dialog.close("") } }, "Not now"),
        el(
          "button",
          { type: "button", class: "button primary", on: { click: () => dialog.close(field.value.trim()) } },
          "Use this key",
        ),
      ),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) dialog.close(field.value.trim());
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue || null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
