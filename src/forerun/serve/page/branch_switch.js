/** "‹ 2 / 3 ›" beside a message that has other versions. */

import { el, iconButton } from "./dom.js";
import { siblings } from "./conversations.js";

export function branchSwitch(chat, node) {
  const all = siblings(chat.current, node);
  if (all.length < 2) return null;
  const index = all.indexOf(node);
  const busy = chat.run !== null;
  return el(
    "span",
    { class: "branches", role: "group", "aria-label": "Versions of this message" },
    iconButton("left", "Previous version", () => chat.turn(node, -1), {
      class: "small",
      disabled: busy || index === 0,
    }),
    `${index + 1} / ${all.length}`,
    iconButton("right", "Next version", () => chat.turn(node, 1), {
      class: "small",
      disabled: busy || index === all.length - 1,
    }),
  );
}
