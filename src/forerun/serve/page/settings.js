/** What the user has set: for requests (null: the server's default) and for the looks of the page. */

export const REQUEST_DEFAULTS = {
  system: "",
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  maxTokens: null,
  seed: null,
  draft: "auto",
  depth: null,
  thinkingBudget: null,
};
const LOOK_DEFAULTS = { theme: "system", sidebar: true, drafts: false, engine: false };

class Kept extends EventTarget {
  constructor(name, defaults) {
    super();
    this.name = name;
    this.defaults = defaults;
    this.values = { ...defaults, ...read(name, defaults) };
  }

  /** Keeps what changed and tells whoever listens for "change". */
  set(changes) {
    Object.assign(this.values, changes);
    try {
      localStorage.setItem(this.name, JSON.stringify(this.values));
    } catch {
      // Storage is full or closed: it holds for this visit.
    }
    this.dispatchEvent(new Event("change"));
  }

  reset() {
    this.set(this.defaults);
  }
}

/** Only fields that we know and whose kind fits: an older page, or a hand, may have written something else. */
function read(name, defaults) {
  try {
    const stored = JSON.parse(localStorage.getItem(name) ?? "{}");
    const fits = ([field, value]) =>
      field in defaults &&
      (defaults[field] === null ? value === null || Number.isFinite(value) : typeof value === typeof defaults[field]);
    return Object.fromEntries(Object.entries(stored).filter(fits));
  } catch {
    return {};
  }
}

export const requestSettings = () => new Kept("forerun.request", REQUEST_DEFAULTS);
export const lookSettings = () => new Kept("forerun.look", LOOK_DEFAULTS);
