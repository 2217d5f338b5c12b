/** The bar at the top: which model answers, and the switches. */

import { el, iconButton } from "./dom.js";
import { icon } from "./icons.js";
import { drafterName } from "./sources.js";

const THEMES = ["system", "light", "dark"];
const THEME_ICONS = { system: "half", light: "sun", dark: "moon" };

export class TopbarView {
  /** `actions`: toggleSidebar, newChat, toggleEngine, openSettings. */
  constructor(root, look, actions) {
    this.look = look;
    this.name = el("span", { class: "model-name" }, "forerun");
    this.facts = el("span", { class: "model-facts" });
    this.dot = el("span", { class: "dot", "aria-hidden": "true" });
    this.engine = el(
      "button",
      {
        type: "button",
        class: "engine-button",
        title: "Live view of the engine",
        "aria-label": "Engine",
        "aria-controls": "engine",
        on: { click: actions.toggleEngine },
      },
      this.dot,
      el("span", { class: "label" }, "Engine"),
    );
    this.drafts = el("input", {
      type: "checkbox",
      role: "switch",
      id: "show-drafts",
      on: { change: () => look.set({ drafts: this.drafts.checked }) },
    });
    this.theme = iconButton("half", "Theme", () =>
      look.set({ theme: THEMES[(THEMES.indexOf(look.values.theme) + 1) % THEMES.length] }),
    );
    root.append(
      iconButton("sidebar", "Conversations", actions.toggleSidebar, { class: "show-sidebar" }),
      iconButton("plus", "New chat", actions.newChat, { class: "new-here" }),
      el("div", { class: "model" }, this.name, this.facts),
      el(
        "label",
        { class: "switch", title: "Colour each token by where it came from" },
        this.drafts,
        el("span", {}, el("span", { class: "long" }, "Show "), el("span", { class: "drafts-word" }, "drafts")),
      ),
      this.engine,
      this.theme,
      iconButton("settings", "Settings", actions.openSettings),
    );
    look.addEventListener("change", () => this.update());
    this.update();
  }

  update() {
    const { theme, drafts, engine } = this.look.values;
    this.drafts.checked = drafts;
    this.engine.setAttribute("aria-expanded", String(engine));
    this.theme.replaceChildren(icon(THEME_ICONS[theme]));
    const label = `Theme: ${theme === "system" ? "as the system" : theme}`;
    this.theme.title = label;
    this.theme.setAttribute("aria-label", label);
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  /** What the server says it serves. */
  showModel({ model, context, drafters = [] }) {
    this.name.textContent = model;
    this.name.title = model;
    const facts = [];
    if (context) facts.push(`${context.toLocaleString("en")} tokens of context`);
    if (drafters.length) facts.push(`drafts by ${drafters.map(drafterName).join(", ")}`);
    this.facts.textContent = facts.join(" · ");
    document.title = `${model} · forerun`;
  }

  showStatus(status) {
    this.dot.dataset.status = status;
  }

  showProblem(text) {
    this.name.textContent = text;
    this.facts.textContent = "";
  }
}
