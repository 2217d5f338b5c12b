/** Markdown inside a line: code, emphasis, links. Builds nodes; the text of a model never becomes HTML. */

import { el } from "./dom.js";

const DEEPEST = 8;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BARE_URL = /https?:\/\/[^\s<>"'`]+/y;

/** Nodes for `text`. */
export function inline(text, depth = 0) {
  const nodes = [];
  const hopeless = new Set(); // delimiters that nothing closes from here on
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  while (at < text.length) {
    const found = depth < DEEPEST ? construct(text, at, depth, hopeless) : null;
    if (found) {
      flush();
      nodes.push(...found.nodes);
      at = found.end;
    } else if (text[at] === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (text[at] === "\n") {
      flush();
      plain = plain.trimEnd();
      nodes.push(el("br"));
      at += 1;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

/** What begins at `at`, as nodes and where it ends; null: nothing but text. */
function construct(text, at, depth, hopeless) {
  switch (text[at]) {
    case "`":
      return codeSpan(text, at, hopeless);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth, hopeless);
    case "[":
      return link(text, at, depth, hopeless);
    case "!":
      return text[at + 1] === "[" ? picture(text, at, depth, hopeless) : null;
    case "<":
      return angled(text, at);
    case "h":
      return bareUrl(text, at);
    default:
      return null;
  }
}

function codeSpan(text, at, hopeless) {
  const ticks = run(text, at, "`");
  if (hopeless.has(ticks)) return null;
  const end = closingTicks(text, at + ticks.length, ticks.length);
  if (end < 0) {
    hopeless.add(ticks);
    return { nodes: [ticks], end: at + ticks.length };
  }
  let code = text.slice(at + ticks.length, end).replaceAll("\n", " ");
  if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
  return { nodes: [el("code", {}, code)], end: end + ticks.length };
}

function closingTicks(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0;) {
    const ticks = run(text, at, "`").length;
    if (ticks === length) return at;
    at = text.indexOf("`", at + ticks);
  }
  return -1;
}

const TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

function emphasis(text, at, depth, hopeless) {
  const sign = text[at];
  const length = Math.min(run(text, at, sign).length, 3);
  if (sign === "~" && length !== 2) return null;
  const delimiter = sign.repeat(length);
  const opens = !/\s/.test(text[at + length] ?? " ") && (sign !== "_" || !WORD.test(text[at - 1] ?? ""));
  if (!opens || hopeless.has(delimiter)) return skipRun(text, at, sign);
  const end = closingDelimiter(text, at + length, delimiter);
  if (end < 0) {
    hopeless.add(delimiter);
    return skipRun(text, at, sign);
  }
  const inside = inline(text.slice(at + length, end), depth + 1);
  const tags = sign === "~" ? ["del"] : TAGS[length];
  return { nodes: [tags.reduceRight((nodes, tag) => [el(tag, {}, nodes)], inside)[0]], end: end + length };
}

/** A run that neither opens nor closes is text as a whole: "**" must not be read again as two of "*". */
function skipRun(text, at, sign) {
  const whole = run(text, at, sign);
  return { nodes: [whole], end: at + whole.length };
}

function closingDelimiter(text, from, delimiter) {
  const sign = delimiter[0];
  for (let at = from; at < text.length;) {
    if (text[at] === "\\") at += 2;
    else if (text[at] === "`") {
      const ticks = run(text, at, "`").length;
      const end = closingTicks(text, at + ticks, ticks);
      at = end < 0 ? at + ticks : end + ticks;
    } else if (text[at] === sign) {
      const length = run(text, at, sign).length;
      const closes = at > from && !/\s/.test(text[at - 1]) && (sign !== "_" || !WORD.test(text[at + length] ?? ""));
      // A longer run closes what is inside first: **a *b*** ends with "*", then "**".
      if (closes && (length === delimiter.length || length === 3)) return at + length - delimiter.length;
      at += length;
    } else at += 1;
  }
  return -1;
}

function link(text, at, depth, hopeless) {
  const parts = linkParts(text, at, hopeless);
  if (!parts) return null;
  return { nodes: anchor(parts.url, inline(parts.label, depth + 1)), end: parts.end };
}

/** A picture is shown as a link: loading it would tell another host what was said here. */
function picture(text, at, depth, hopeless) {
  const parts = linkParts(text, at + 1, hopeless);
  if (!parts) return null;
  return { nodes: anchor(parts.url, [parts.label || parts.url]), end: parts.end };
}

function linkParts(text, at, hopeless) {
  if (hopeless.has("[")) return null;
  const middle = text.indexOf("](", at);
  if (middle < 0) {
    hopeless.add("[");
    return null;
  }
  let close = -1;
  for (let i = at, open = 0; i <= middle; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") open += 1;
    else if (text[i] === "]" && (open -= 1) === 0) {
      close = i;
      break;
    }
  }
  if (close < 0 || text[close + 1] !== "(") return null;
  let end = close + 2;
  for (let open = 1; end < text.length; end += 1) {
    if (text[end] === "\n") return null;
    if (text[end] === "(") open += 1;
    if (text[end] === ")" && (open -= 1) === 0) break;
  }
  if (end >= text.length) return null;
  const url = text
    .slice(close + 2, end)
    .trim()
    .replace(/\s+(["']).*\1$/, "")
    .replace(/^<(.*)>$/, "$1");
  return { label: text.slice(at + 1, close), url, end: end + 1 };
}

function angled(text, at) {
  const lineBreak = /^<br\s?\/?>/i.exec(text.slice(at, at + 6));
  if (lineBreak) return { nodes: [el("br")], end: at + lineBreak[0].length };
  const end = text.indexOf(">", at);
  const url = end < 0 || end - at > 2000 ? "" : text.slice(at + 1, end);
  return /^(https?:\/\/|mailto:)\S+$/.test(url) ? { nodes: anchor(url, [url]), end: end + 1 } : null;
}

function bareUrl(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  BARE_URL.lastIndex = at;
  let url = BARE_URL.exec(text)?.[0];
  if (!url) return null;
  url = url.replace(/[.,;:!?*_~]+$/, "");
  if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  return { nodes: anchor(url, [url]), end: at + url.length };
}

/** A link where the address is a harmless one, else what it says and the address as text. */
function anchor(url, label) {
  let scheme = "";
  try {
    scheme = new URL(url).protocol;
  } catch {
    // Relative addresses mean nothing here.
  }
  if (!SCHEMES.has(scheme)) return [...label, ` (${url})`];
  return [el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, label)];
}

function run(text, at, sign) {
  let end = at;
  while (text[end] === sign) end += 1;
  return text.slice(at, end);
}
