/** Files that go with a question: read into data URIs, kept with the message, sent as parts of it. */

// What servers read of each kind; the second is what a file dialog offers.
const TYPES = {
  image: [/^image\/(png|jpeg|webp|gif|bmp)$/, "image/png,image/jpeg,image/webp,image/gif,image/bmp"],
  video: [/^video\/[\w.+-]+$/, "video/*"],
  audio: [/^audio\/[\w.+-]+$/, "audio/*"],
};
// In the words of /props.
const MODALITIES = { image: "vision", video: "video", audio: "audio" };

/** The kinds that the model reads. */
export function readKinds({ modalities = {} }) {
  return Object.keys(MODALITIES).filter((kind) => modalities[MODALITIES[kind]] === true);
}

/** For a file dialog. */
export function acceptedTypes(kinds) {
  return kinds.map((kind) => TYPES[kind][1]).join(",");
}

export function kindOf(type) {
  return Object.keys(TYPES).find((kind) => TYPES[kind][0].test(type)) ?? null;
}

/** A file as plain data: { kind, name, url }. */
export function readAttachment(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ kind: kindOf(file.type), name: file.name, url: reader.result });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** The content of a message: text alone, or what is shown and then the text. */
export function contentOf({ content, media = [] }) {
  if (!media.length) return content;
  const parts = media.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** Attachments of an imported message, which may be anything. */
export function importedMedia(raw) {
  if (!Array.isArray(raw)) return [];
  return raw.filter(isAttachment).map(({ kind, name, url }) => ({ kind, name: name.slice(0, 200), url }));
}

function isAttachment(raw) {
  if (typeof raw?.name !== "string" || typeof raw.url !== "string") return false;
  const type = /^data:([\w.+-]+\/[\w.+-]+)(;[\w.+-]+=[^;,]*)*;base64,[\w+/=]*$/.exec(raw.url)?.[1];
  return type !== undefined && kindOf(type) !== null && kindOf(type) === raw.kind;
}
