/** Icons and other drawings, made of nodes. */

const SVG = "http://www.w3.org/2000/svg";

// Strokes on a grid of 24.
const ICONS = {
  sidebar: "M4 5h16v14H4zM9.5 5v14",
  plus: "M12 5v14M5 12h14",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM20 20l-4-4",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7",
  again: "M19 12a7 7 0 1 1-2.2-5.1L20 9.5M20 4v5.5h-5.5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  settings:
    "M4 7h9M18.5 7H20M4 17h1.5M11 17h9M15.75 9.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5z" +
    "M8.25 19.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5z",
  sun:
    "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2" +
    "M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  half: "M12 20a8 8 0 1 0 0-16 8 8 0 0 0 0 16zM12 4v16M12 8h5.5M12 12h8M12 16h5.5",
  export: "M12 15V4M8 8l4-4 4 4M5 14v6h14v-6",
  import: "M12 4v11M8 11l4 4 4-4M5 14v6h14v-6",
  clip: "M19.5 11.5l-7.8 7.8a4.7 4.7 0 0 1-6.7-6.7l8-8a3.2 3.2 0 0 1 4.5 4.5l-8 8a1.6 1.6 0 0 1-2.3-2.3l7.2-7.2",
  film: "M4 5h16v14H4zM10 9.5v5l4.5-2.5z",
  sound: "M5 10v4h3l4 4V6l-4 4zM15.5 9.5a3.5 3.5 0 0 1 0 5M18 7a7 7 0 0 1 0 10",
  warning: "M12 9v4.5M12 16.8v.2M12 4L2.8 19.5h18.4z",
};

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function icon(name) {
  return svg(
    "svg",
    {
      class: "icon",
      viewBox: "0 0 24 24",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.8",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
      "aria-hidden": "true",
    },
    svg("path", { d: ICONS[name] }),
  );
}
