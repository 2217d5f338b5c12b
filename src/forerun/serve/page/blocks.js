/** Markdown as blocks: paragraphs, headings, lists, quotes, tables, code. Half a text gives half of its last block. */

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:(\s+)(.*))?$/;
const TASK = /^\[([ xX])\]\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
const DEEPEST = 10;

/** Blocks of a text. Each is plain data, so that two can be compared. */
export function blocks(text) {
  return parse(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
}

function parse(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const nested = depth < DEEPEST;
    const next =
      code(lines, at) ??
      heading(line, at) ??
      rule(line, at) ??
      (nested ? quote(lines, at, depth) : null) ??
      (nested ? list(lines, at, depth) : null) ??
      table(lines, at) ??
      paragraph(lines, at, nested);
    found.push(next.block);
    at = next.end;
  }
  return found;
}

function code(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (!fence) return null;
  const [, indent, marks, language] = fence;
  const text = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.startsWith(marks) && !line.replaceAll(marks[0], "")) {
      closed = true;
      end += 1;
      break;
    }
    text.push(dedent(lines[end], indent.length));
  }
  // Part of a closing fence, while it is being written, is not code.
  if (!closed && text.length && marks.startsWith(text.at(-1).trim()) && text.at(-1).trim()) text.pop();
  return { block: { type: "code", language, text: text.join("\n") }, end };
}

function heading(line, at) {
  const found = HEADING.exec(line);
  return found && { block: { type: "heading", level: found[1].length, text: found[2] ?? "" }, end: at + 1 };
}

function rule(line, at) {
  return RULE.test(line) ? { block: { type: "rule" }, end: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !begins(lines, end)))) {
    inside.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return { block: { type: "quote", blocks: parse(inside, depth + 1) }, end };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const indent = first[1].length;
  const kind = kindOf(first[2]);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (!mark || Math.abs(mark[1].length - indent) > 1 || kindOf(mark[2]) !== kind || RULE.test(lines[end])) break;
    const width = mark[1].length + mark[2].length + Math.min(mark[3]?.length ?? 1, 4);
    const inside = [mark[4] ?? ""];
    end += 1;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      const blank = !line.trim();
      // Models indent what belongs to an item by two to four blanks, whatever the mark is wide.
      if (blank || indentOf(line) >= indent + 2) inside.push(dedent(line, width));
      else if (inside.at(-1).trim() && !begins(lines, end)) inside.push(line.trim());
      else break;
    }
    let blanks = 0;
    while (inside.length && !inside.at(-1).trim()) {
      inside.pop();
      blanks += 1;
    }
    const task = TASK.exec(inside[0] ?? "");
    if (task) inside[0] = task[2];
    items.push({ task: task ? task[1] !== " " : null, blocks: parse(inside, depth + 1) });
    const another = end < lines.length && ITEM.test(lines[end]);
    if (blanks && another) loose = true;
  }
  const start = kind === "-" ? null : Number.parseInt(first[2], 10);
  return { block: { type: "list", start, loose, items }, end };
}

function kindOf(mark) {
  return /\d/.test(mark) ? mark.at(-1) : "-";
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const marks = cells(lines[at + 1]);
  const header = cells(lines[at]);
  if (!lines[at + 1].includes("-") || marks.length !== header.length || !marks.every((cell) => /^:?-+:?$/.test(cell)))
    return null;
  const align = marks.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end += 1) {
    const row = cells(lines[end]);
    rows.push(header.map((_, column) => row[column] ?? ""));
  }
  return { block: { type: "table", align, header, rows }, end };
}

/** Cells of a row; a "|" that is escaped or inside code does not part them. */
function cells(line) {
  const found = [""];
  let code = false;
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
      continue;
    }
    if (text[at] === "`") code = !code && text.includes("`", at + 1);
    if (text[at] === "|" && !code) found.push("");
    else found[found.length - 1] += text[at];
  }
  if (found.length > 1 && !found.at(-1).trim()) found.pop();
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at, nested) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !(nested && begins(lines, end))) end += 1;
  return {
    block: {
      type: "paragraph",
      text: lines
        .slice(at, end)
        .map((line) => line.trim())
        .join("\n"),
    },
    end,
  };
}

/** Does another block begin here, even right after a paragraph? */
function begins(lines, at) {
  const line = lines[at];
  return (
    FENCE.test(line) ||
    HEADING.test(line) ||
    QUOTE.test(line) ||
    RULE.test(line) ||
    Boolean(ITEM.exec(line)?.[4]) ||
    table(lines, at) !== null
  );
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function dedent(line, width) {
  return line.slice(Math.min(indentOf(line), width));
}
