/**
 * What can be set for the answers to come. Everything is kept as it is typed; an empty field shows the value that
 * holds, which is the server's.
 */

import { el, iconButton } from "./dom.js";
import { drafterName } from "./sources.js";

const NUMBERS = [
  // setting, label, name among the server's defaults, attributes
  ["temperature", "Temperature", "temperature", { min: 0, max: 2, step: "any" }],
  ["topP", "Top p", "top_p", { min: 0.01, max: 1, step: "any" }],
  ["topK", "Top k", "top_k", { min: 0, step: 1 }],
  ["minP", "Min p", "min_p", { min: 0, max: 1, step: "any" }],
  ["maxTokens", "Max tokens", "max_tokens", { min: 1, step: 1 }],
  ["seed", "Seed", "seed", { min: 0, step: 1 }],
];
const NO_DEFAULT = { seed: "random", max_tokens: "no limit" };

export class SettingsDialog {
  constructor(settings) {
    this.settings = settings;
    this.props = { defaults: {}, drafters: [] };
    this.root = el("dialog", {
      class: "dialog",
      id: "settings",
      "aria-labelledby": "settings-title",
      on: {
        // A click on the backdrop is one on the dialog itself.
        click: (event) => {
          if (event.target === this.root) this.root.close();
        },
      },
    });
    document.body.append(this.root);
  }

  know(props) {
    const { generation_defaults: defaults = {}, drafters = [] } = props;
    this.props = { defaults, drafters };
    // What was set for another model may not exist here.
    const { draft } = this.settings.values;
    if (!["auto", "off", ...drafters].includes(draft)) this.settings.set({ draft: "auto", depth: null });
  }

  open() {
    this.#draw();
    this.root.showModal();
  }

  #draw() {
    const { values } = this.settings;
    const { defaults } = this.props;
    const system = el("textarea", {
      class: "input",
      rows: "3",
      placeholder: "You are a helpful assistant.",
      value: values.system,
      on: { input: () => this.settings.set({ system: system.value }) },
    });
    const numbers = NUMBERS.map(([name, label, field, bounds]) =>
      this.#number(name, label, defaults[field] ?? NO_DEFAULT[field] ?? "…", bounds),
    );
    this.depth = this.#number("depth", "Drafts per round", "measured", { min: 1, max: 15, step: 1 });
    const budget = this.#number("thinkingBudget", "Thinking budget", "no limit", { min: 0, step: 1 });
    this.root.replaceChildren(
      el(
        "div",
        { class: "dialog-head" },
        el("h2", { id: "settings-title" }, "Settings"),
        iconButton("close", "Close", () => this.root.close()),
      ),
      el(
        "div",
        { class: "dialog-body" },
        el(
          "section",
          {},
          el("h3", {}, "System prompt"),
          el("label", { class: "field" }, el("span", { class: "unseen" }, "System prompt"), system),
        ),
        el("section", {}, el("h3", {}, "Sampling"), el("div", { class: "field-grid" }, numbers)),
        el(
          "section",
          {},
          el("h3", {}, "Speculation"),
          this.#drafters(),
          el("div", { class: "field-grid" }, this.depth),
          el(
            "span",
            { class: "field-note" },
            "The text is the same whatever you choose here; only its speed changes. Auto goes by measured time.",
          ),
        ),
        el(
          "section",
          {},
          el("h3", {}, "Thinking"),
          el("div", { class: "field-grid" }, budget),
          el(
            "span",
            { class: "field-note" },
            "Tokens a model may think before it must answer, where it thinks at all.",
          ),
        ),
      ),
      el(
        "div",
        { class: "dialog-foot" },
        el(
          "button",
          {
            type: "button",
            class: "button",
            on: {
              click: () => {
                this.settings.reset();
                this.#draw();
              },
            },
          },
          "Reset all",
        ),
        el("button", { type: "button", class: "button primary", on: { click: () => this.root.close() } }, "Done"),
      ),
    );
    this.#depthMatters();
  }

  #number(name, label, fallback, bounds) {
    const value = this.settings.values[name];
    const field = el("input", {
      class: "input",
      type: "number",
      inputmode: "decimal",
      name,
      placeholder: String(fallback),
      ...bounds,
      value: value === null ? "" : String(value),
      on: {
        // A number out of bounds is not kept: the field says so.
        input: () => {
          if (field.checkValidity()) this.settings.set({ [name]: field.value === "" ? null : field.valueAsNumber });
        },
        change: () => field.reportValidity(),
      },
    });
    return el("label", { class: "field" }, el("span", { class: "field-label" }, label), field);
  }

  #drafters() {
    const choices = ["auto", "off", ...this.props.drafters];
    return el(
      "fieldset",
      { class: "segments", "aria-label": "Who drafts" },
      choices.map((name) =>
        el(
          "label",
          {},
          el("input", {
            type: "radio",
            name: "draft",
            checked: this.settings.values.draft === name,
            on: {
              change: () => {
                this.settings.set({ draft: name });
                this.#depthMatters();
              },
            },
            value: name,
          }),
          el("span", {}, drafterName(name)),
        ),
      ),
    );
  }

  /** Only a drafter that was named can be told how far to go. */
  #depthMatters() {
    this.depth.querySelector("input").disabled = ["auto", "off"].includes(this.settings.values.draft);
  }
}
