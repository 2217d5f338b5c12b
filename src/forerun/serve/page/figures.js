/** Numbers as people read them, and the line of figures under an answer. */

import { el } from "./dom.js";
import { icon } from "./icons.js";

export function short(number) {
  const size = Math.abs(number);
  if (size === 0) return "0";
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  return number.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

export function seconds(number) {
  const size = Math.abs(number);
  if (size >= 90) return `${Math.floor(size / 60)} min ${Math.round(size % 60)} s`;
  return `${size >= 10 ? Math.round(size) : size.toFixed(1)} s`;
}

export function count(number, word) {
  return [el("b", {}, number.toLocaleString("en")), ` ${word}${number === 1 ? "" : "s"}`];
}

/** While it is written: what can be counted here. */
export function liveFigures(tokens, elapsed) {
  const parts = [el("span", {}, count(tokens, "token"))];
  if (tokens > 4 && elapsed > 0.3)
    parts.unshift(el("span", { class: "lead" }, el("b", {}, short(tokens / elapsed)), " tokens/s"));
  return parts;
}

/** When it is done: what the server measured. */
export function answerFigures(statistics, proof) {
  const { tokensPerSecond, tokensPerRound, secondsSaved, tokens, promptTokens, guaranteed } = statistics;
  const parts = [];
  const add = (content, props = {}) => parts.push(el("span", props, content));
  if (tokensPerSecond !== null) add([el("b", {}, short(tokensPerSecond)), " tokens/s"], { class: "lead" });
  if (tokensPerRound !== null) add([el("b", {}, tokensPerRound.toFixed(2)), " tokens per round"]);
  if (secondsSaved !== null) add([el("b", {}, seconds(secondsSaved)), secondsSaved < 0 ? " lost" : " saved"]);
  add(count(tokens, "token"));
  add(count(promptTokens, "prompt token"));
  if (guaranteed && !proof?.report) {
    add([icon("check"), "exact"], {
      class: "exact",
      title: "The same tokens as without drafts: the model was checked for it when it was loaded.",
    });
  }
  return parts;
}

/** What else is known, for those who ask. */
export function answerDetails({ drafted, accepted, promptSeconds, cachedTokens, seed }) {
  const parts = [];
  if (drafted) parts.push(`${accepted} of ${drafted} drafts accepted`);
  if (promptSeconds !== null) parts.push(`prompt read in ${seconds(promptSeconds)}`);
  if (cachedTokens) parts.push(`${cachedTokens} prompt tokens from the cache`);
  if (seed !== null) parts.push(`seed ${seed}`);
  return parts.join(" · ");
}
