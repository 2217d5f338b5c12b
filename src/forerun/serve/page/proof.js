/** An answer decoded again without drafts: what came of it, in figures and in words. */

import { copyText, el, iconButton } from "./dom.js";
import { icon } from "./icons.js";

const OTHER_TEXT =
  "The server gives another text for this question now. Has it been started with another model, or other defaults?";

/**
 * What became of a proof: `again` is the same answer asked for once more, with the server's proof of it. Null: it was
 * stopped, and nothing is known.
 */
export function verdict(node, again) {
  if (again.state === "stopped") return null;
  const proof = again.proof;
  if (again.state === "error" || !proof) return { failed: again.error?.message ?? "The server proves nothing." };
  if (proof.identical === null) return { failed: proof.error };
  if (!proof.identical) return { report: proof.report };
  const shown = again.content === node.content && again.reasoning === node.reasoning;
  return shown ? { tokens: proof.tokens } : { failed: OTHER_TEXT };
}

/** Beside the figures: a button, that it is being done, or that all tokens are the same. */
export function proofFigure(chat, node) {
  const { proof } = node;
  if (proof?.running) return el("span", { class: "proving" }, "proving…");
  if (proof?.tokens !== undefined) {
    const title = "Decoded again without drafts: every token is the same.";
    return el("span", { class: "exact proved", title }, icon("check"), "proved");
  }
  if (!node.asked || node.state !== "done") return null;
  return el(
    "span",
    {},
    el(
      "button",
      {
        type: "button",
        class: "prove",
        title: "Decode this answer again without drafts, and compare every token.",
        disabled: chat.run !== null,
        on: { click: () => chat.prove(node) },
      },
      "prove",
    ),
  );
}

/** Below the answer, where it is not proved. */
export function proofNotice({ proof }) {
  if (proof?.failed) return el("p", { class: "notice" }, `Not proved: ${proof.failed}`);
  if (!proof?.report) return null;
  const text = `This is not what the model says without drafts: ${proof.report}`;
  const copy = iconButton("copy", "Copy this report", () => copyText(text, copy), { class: "small" });
  return el("div", { class: "problem", role: "alert" }, icon("warning"), el("p", {}, text), copy);
}

/** In words, for screen readers. */
export function proofWords(proof) {
  if (proof.tokens !== undefined) return "Proved: the same without drafts.";
  return proof.report ? "It differs without drafts." : "Not proved.";
}
