/**
 * What the page does: conversations, questions, answers. Views listen to its events and never change a conversation
 * themselves.
 */

import {
  answerFields,
  addNode,
  exportText,
  importText,
  newConversation,
  pathTo,
  showThrough,
  shownPath,
  siblings,
} from "./conversations.js";
import { fillAnswer } from "./answering.js";
import { verdict } from "./proof.js";
import { chatRequest } from "./request.js";
import { rescue, rescued } from "./store.js";

const SAVE_EVERY = 1000; // milliseconds, while an answer grows

/**
 * Events: "list" (titles or order), "open" (another conversation or another way through it), "answer" (detail: the
 * message that grew), "unsaved".
 */
export class Chat extends EventTarget {
  constructor(server, store, settings) {
    super();
    Object.assign(this, { server, store, settings });
    this.model = "";
    this.conversations = [];
    this.current = newConversation();
    this.runs = new Map(); // conversation id -> { node, stop }
    this.saving = new Map(); // conversation -> writes that have begun
  }

  async load() {
    const kept = new Map((await this.store.all()).map((conversation) => [conversation.id, conversation]));
    for (const conversation of rescued()) {
      kept.set(conversation.id, conversation);
      this.store.put(conversation).catch(() => this.#tell("unsaved"));
    }
    this.conversations = [...kept.values()];
    for (const conversation of this.conversations) {
      for (const node of Object.values(conversation.nodes)) {
        // The page was closed in the middle of it.
        if (node.state === "waiting" || node.state === "streaming") node.state = "interrupted";
        if (node.proof?.running) node.proof = null;
      }
    }
    this.#sort();
    this.#tell("list");
  }

  get path() {
    return shownPath(this.current);
  }

  get run() {
    return this.runs.get(this.current.id) ?? null;
  }

  open(id) {
    this.current = this.conversations.find((conversation) => conversation.id === id) ?? newConversation();
    this.#tell("open");
    this.#tell("list");
  }

  startNew() {
    this.open(null);
  }

  /** Asks below the last message, or in place of `instead`: the old question stays as another branch. */
  ask(text, instead = null, media = []) {
    if ((!text.trim() && !media.length) || this.run) return;
    const conversation = this.current;
    const parent = instead ? instead.parent : conversation.leaf;
    if (!this.conversations.includes(conversation)) this.conversations.push(conversation);
    const question = addNode(conversation, parent, { role: "user", content: text.trim(), media });
    this.#answer(conversation, question);
  }

  /** Another answer to the same question; one that failed before it said anything is replaced. */
  regenerate(node) {
    if (this.run) return;
    const conversation = this.current;
    const followed = Object.values(conversation.nodes).some((other) => other.parent === node.id);
    if (node.state === "error" && !node.content && !node.reasoning && !followed) delete conversation.nodes[node.id];
    this.#answer(conversation, conversation.nodes[node.parent]);
  }

  stop() {
    this.run?.stop();
  }

  /** Asks for the same answer again, decoded with and without drafts. */
  async prove(node) {
    if (this.run) return;
    const conversation = this.current;
    const settings = { ...node.asked, seed: node.statistics.seed };
    const body = chatRequest(this.model, pathTo(conversation, node.parent), settings, true);
    const controller = new AbortController();
    this.runs.set(conversation.id, { node, stop: () => controller.abort() });
    node.proof = { running: true };
    this.#tell("answer", node);
    this.#tell("list");
    const again = answerFields(this.model);
    again.content = "";
    await fillAnswer(again, this.server.chat(body, controller.signal), controller.signal, () => {});
    node.proof = verdict(node, again);
    this.runs.delete(conversation.id);
    this.#save(conversation);
    this.#tell("answer", node);
    this.#tell("list");
  }

  /** The version of a message that is `step` away. */
  turn(node, step) {
    if (this.run) return;
    const all = siblings(this.current, node);
    const next = all[all.indexOf(node) + step];
    if (!next) return;
    showThrough(this.current, next);
    this.#save(this.current);
    this.#tell("open");
  }

  rename(conversation, title) {
    if (title.trim()) Object.assign(conversation, { title: title.trim(), named: true });
    this.#save(conversation);
    this.#tell("list");
  }

  remove(conversation) {
    this.runs.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter((other) => other !== conversation);
    this.store.remove(conversation.id);
    if (this.current === conversation) this.startNew();
    else this.#tell("list");
  }

  restore(conversation) {
    this.conversations.push(conversation);
    this.#save(conversation);
    this.#tell("list");
  }

  exportAll() {
    return exportText(this.conversations);
  }

  /** How many came in. */
  importAll(text) {
    const fresh = importText(text);
    for (const conversation of fresh) {
      this.conversations.push(conversation);
      this.#save(conversation);
    }
    this.#sort();
    this.#tell("list");
    return fresh.length;
  }

  /** Keeps half an answer, and what is still being saved, when the page goes away. */
  rescueUnsaved() {
    rescue(
      this.conversations.filter((conversation) => this.runs.has(conversation.id) || this.saving.has(conversation)),
    );
  }

  async #answer(conversation, question) {
    const body = chatRequest(this.model, pathTo(conversation, question.id), this.settings.values);
    const asked = { ...this.settings.values };
    const node = addNode(conversation, question.id, { ...answerFields(this.model), asked });
    const controller = new AbortController();
    this.runs.set(conversation.id, { node, stop: () => controller.abort() });
    this.#sort();
    this.#save(conversation);
    this.#tell("open");
    this.#tell("list");
    let saved = performance.now();
    await fillAnswer(node, this.server.chat(body, controller.signal), controller.signal, () => {
      this.#tell("answer", node);
      if (performance.now() - saved < SAVE_EVERY) return;
      saved = performance.now();
      this.#save(conversation);
    });
    this.runs.delete(conversation.id);
    conversation.updated = Date.now();
    this.#save(conversation);
    this.#tell("answer", node);
    this.#tell("list");
  }

  #sort() {
    this.conversations.sort((a, b) => b.updated - a.updated);
  }

  #save(conversation) {
    if (!this.conversations.includes(conversation)) return; // deleted meanwhile
    this.saving.set(conversation, 1 + (this.saving.get(conversation) ?? 0));
    this.store
      .put(structuredClone(conversation))
      .catch(() => this.#tell("unsaved"))
      .finally(() => {
        const left = this.saving.get(conversation) - 1;
        if (left) this.saving.set(conversation, left);
        else this.saving.delete(conversation);
      });
  }

  #tell(type, detail = null) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
