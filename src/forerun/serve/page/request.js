/** A conversation and the settings as the body of a request. What is not set is not sent: the server knows better. */

import { contentOf } from "./attachments.js";

const FIELDS = {
  temperature: "temperature",
  topP: "top_p",
  topK: "top_k",
  minP: "min_p",
  maxTokens: "max_completion_tokens",
  seed: "seed",
  thinkingBudget: "thinking_budget",
};

/** `path`: the nodes from the first question to the last one; `prove`: decode the answer again without drafts. */
export function chatRequest(model, path, settings, prove = false) {
  // A question that got no answer is left out with it: many templates want the two to take turns.
  const said = path.filter((node, at) =>
    node.role === "user" ? at + 1 === path.length || path[at + 1].content : node.content,
  );
  const messages = said.map((node) => ({ role: node.role, content: contentOf(node) }));
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system.trim() });
  const body = {
    ...(model ? { model } : {}), // not known while the server loads it
    messages,
    stream: true,
    stream_options: { include_usage: true },
    return_token_details: true,
  };
  for (const [name, field] of Object.entries(FIELDS)) if (settings[name] !== null) body[field] = settings[name];
  const speculative = prove ? { ...wish(settings), prove } : speculation(settings);
  if (speculative !== null) body.speculative = speculative;
  return body;
}

function speculation({ draft, depth }) {
  if (draft === "auto") return null; // what the server does by itself
  return depth === null || draft === "off" ? draft : { draft, depth };
}

/** The same as an object. */
function wish(settings) {
  const speculative = speculation(settings) ?? "auto";
  return typeof speculative === "string" ? { draft: speculative } : speculative;
}
