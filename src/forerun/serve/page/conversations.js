/**
 * A conversation is a tree: each message has a parent, an edited question or a second answer is a sibling, and `leaf`
 * says which way through the tree is shown. Plain data throughout, so that it can be stored, exported and read back.
 */

import { importedMedia } from "./attachments.js";

const LONGEST_TITLE = 60;
export const NEW_TITLE = "New chat";

export function newConversation() {
  return {
    id: crypto.randomUUID?.() ?? fallbackId(),
    title: NEW_TITLE,
    named: false,
    created: Date.now(),
    updated: Date.now(),
    leaf: null,
    nodes: {},
  };
}

/** crypto.randomUUID is missing where the page comes by plain http from another machine. */
function fallbackId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Adds a message below `parent` and shows the way to it. */
export function addNode(conversation, parent, fields) {
  const id = String(1 + Math.max(0, ...Object.keys(conversation.nodes).map(Number)));
  const node = { id, parent, created: Date.now(), content: "", ...fields };
  conversation.nodes[id] = node;
  conversation.leaf = id;
  conversation.updated = Date.now();
  if (!conversation.named && node.role === "user" && parent === null) {
    conversation.title = titleFor(node.content || (node.media?.[0]?.name ?? ""));
  }
  return node;
}

/** An answer that is about to come. */
export function answerFields(model) {
  return {
    role: "assistant",
    model,
    reasoning: "",
    reasoningSeconds: null,
    tokens: [],
    state: "waiting",
    error: null,
    finish: null,
    statistics: null,
    asked: null, // the settings it was asked for with
    proof: null, // see proof.js
  };
}

/** Messages from the first to `id`. */
export function pathTo(conversation, id) {
  const path = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

export function shownPath(conversation) {
  return pathTo(conversation, conversation.leaf);
}

/** The other versions of a message, itself among them, oldest first. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((other) => other.parent === node.parent)
    .sort((a, b) => a.id - b.id);
}

/** Shows the way through `node`, and below it the newest one. */
export function showThrough(conversation, node) {
  let leaf = node;
  for (;;) {
    const below = Object.values(conversation.nodes)
      .filter((other) => other.parent === leaf.id)
      .sort((a, b) => b.id - a.id);
    if (!below.length) break;
    [leaf] = below;
  }
  conversation.leaf = leaf.id;
}

export function titleFor(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1).trimEnd()}…` : line || NEW_TITLE;
}

/** Does it have all the words, in its title or in what was said? */
export function matches(conversation, query) {
  const text = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)]
    .join("\n")
    .toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

export function exportText(conversations) {
  return JSON.stringify({ forerun: "conversations", version: 1, conversations }, null, 1);
}

/** Conversations of a file that may be anything. Only known fields of the right kind come through. */
export function importText(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (data?.forerun !== "conversations" || !Array.isArray(data.conversations))
    throw new Error("This file holds no exported conversations.");
  return data.conversations.map(readConversation).filter((conversation) => conversation.leaf !== null);
}

function readConversation(raw) {
  const conversation = newConversation();
  if (typeof raw?.title === "string") Object.assign(conversation, { title: raw.title.slice(0, 200), named: true });
  for (const field of ["created", "updated"]) if (Number.isFinite(raw?.[field])) conversation[field] = raw[field];
  const nodes = Object.entries(raw?.nodes ?? {})
    .filter(([id]) => /^\d{1,9}$/.test(id))
    .sort(([a], [b]) => a - b);
  for (const [id, node] of nodes) {
    const parent = node?.parent === null ? null : String(node?.parent);
    // A parent is older than its children: this also keeps circles out.
    if (parent !== null && !(parent in conversation.nodes)) continue;
    if (!["user", "assistant"].includes(node.role) || typeof node.content !== "string") continue;
    conversation.nodes[id] = {
      ...(node.role === "user" ? { role: "user", media: importedMedia(node.media) } : readAnswer(node)),
      id,
      parent,
      content: node.content,
      created: conversation.created,
    };
    conversation.leaf = id;
  }
  if (raw?.leaf in conversation.nodes) conversation.leaf = String(raw.leaf);
  return conversation;
}

function readAnswer(raw) {
  const answer = { ...answerFields(typeof raw.model === "string" ? raw.model : ""), state: "done" };
  if (typeof raw.reasoning === "string") answer.reasoning = raw.reasoning;
  if (Number.isFinite(raw.reasoningSeconds)) answer.reasoningSeconds = raw.reasoningSeconds;
  if (["stopped", "interrupted"].includes(raw.state)) answer.state = raw.state;
  if (raw.finish === "length") answer.finish = "length";
  if (Array.isArray(raw.tokens)) {
    answer.tokens = raw.tokens
      .filter(
        (token) =>
          Array.isArray(token) &&
          typeof token[0] === "string" &&
          typeof token[1] === "string" &&
          Number.isInteger(token[2]),
      )
      .map(([text, source, round, thinking]) => [text, source, round, thinking ? 1 : 0]);
  }
  const numbers = Object.entries(raw.statistics ?? {}).filter(([, value]) =>
    ["number", "boolean"].includes(typeof value),
  );
  if (numbers.length) answer.statistics = Object.fromEntries(numbers);
  return answer;
}
