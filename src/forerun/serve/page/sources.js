/** Where tokens come from: a key for colours, a name, and a sentence. */

const MODEL = { key: "model", name: "Model", story: "The model chose it itself." };
const SOURCES = {
  model: MODEL,
  plain: { ...MODEL, name: "Plain" },
  mtp: { key: "mtp", name: "MTP head", story: "Drafted by the MTP head; the model agreed." },
  lookup: { key: "lookup", name: "Lookup", story: "Found in the text so far; the model agreed." },
  "long lookup": {
    key: "long-lookup",
    name: "Long lookup",
    story: "Part of a long stretch of the text so far; the model agreed.",
  },
  "draft model": { key: "draft-model", name: "Draft model", story: "Drafted by a smaller model; the model agreed." },
  assistant: { key: "draft-model", name: "Assistant", story: "Drafted by the assistant model; the model agreed." },
  grammar: { key: "grammar", name: "Grammar", story: "The required format allows nothing else here." },
};

export function sourceOf(name) {
  if (Object.hasOwn(SOURCES, name)) return SOURCES[name];
  return { key: "other", name, story: `Drafted by ${name}; the model agreed.` };
}

/** The engine calls its draft model "model", as an arm. Beside tokens of the model itself that would mislead. */
export function drafterName(arm) {
  return arm === "model" ? "draft model" : arm;
}

/** [source, count] of each source, the model first and then by count. `counts`: by the server's names. */
export function mixOf(counts) {
  const mix = new Map();
  for (const [name, count] of Object.entries(counts)) {
    const source = sourceOf(name);
    const before = mix.get(source.name);
    mix.set(source.name, [source, (before?.[1] ?? 0) + count]);
  }
  return [...mix.values()].sort(([a, m], [b, n]) => (b.key === "model") - (a.key === "model") || n - m);
}
