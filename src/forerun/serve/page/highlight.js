/** Light colours for code: comments, strings, numbers, keywords, names that are called. No grammar, one pass. */

import { el } from "./dom.js";

const LONGEST = 100_000; // more is shown without colours

const words = (...lines) => new Set(lines.join(" ").split(" "));
const WORDS = {
  python: words(
    "and as assert async await break class continue def del elif else except finally for from global if import in is",
    "lambda match case nonlocal not or pass raise return try while with yield None True False self",
  ),
  javascript: words(
    "async await break case catch class const continue default delete do else export extends finally for from function",
    "if import in instanceof interface let new null of return static super switch this throw true false try type",
    "typeof undefined var void while yield",
  ),
  c: words(
    "if else for while do switch case default break continue return struct class enum union public private protected",
    "static const void int float double char bool long short unsigned signed auto new delete this true false null",
    "nullptr namespace using template typename virtual override final try catch throw import package interface extends",
    "implements var fun func val let when string",
  ),
  rust: words(
    "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move",
    "mut pub ref return self Self static struct super trait true type unsafe use where while",
  ),
  go: words(
    "break case chan const continue default defer else fallthrough for func go goto if import interface map nil",
    "package range return select struct switch true false type var",
  ),
  shell: words(
    "if then else elif fi for in do done while until case esac function return export local set echo cd exit",
  ),
  sql: words(
    "select from where and or not insert into values update set delete create table alter drop join left right inner",
    "outer on as group by order having limit distinct null is in like between union all primary key index with",
    "case when then else end",
  ),
  json: words("true false null"),
  yaml: words("true false null yes no"),
  css: words("important"),
  markup: words(""),
};
const ALIASES = {
  python: ["py", "python3"],
  javascript: ["js", "jsx", "ts", "tsx", "typescript", "mjs"],
  c: ["cpp", "c++", "h", "java", "kotlin", "kt", "c#", "cs", "csharp", "swift", "php", "scala", "dart"],
  rust: ["rs"],
  go: ["golang"],
  shell: ["sh", "bash", "zsh", "console", "dockerfile", "makefile"],
  sql: ["postgresql", "mysql", "sqlite"],
  json: ["jsonc"],
  yaml: ["yml", "toml", "ini"],
  markup: ["html", "xml", "svg"],
};
const HASH = new Set(["python", "shell", "yaml"]);
const SLASHES = new Set(["javascript", "c", "rust", "go", "css", "json"]);

const DOUBLE = String.raw`"(?:\\[^]|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\[^]|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const NAME = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;

/** Nodes for `code`. An unknown language gets no colours. */
export function highlight(name, code) {
  const given = name.toLowerCase();
  const language = Object.keys(ALIASES).find((each) => ALIASES[each].includes(given)) ?? given;
  if (!Object.hasOwn(WORDS, language) || code.length > LONGEST) return [code];
  const nodes = [];
  let last = 0;
  for (const match of code.matchAll(pattern(language))) {
    const kind = kindOf(match, language, code);
    if (!kind) continue;
    if (match.index > last) nodes.push(code.slice(last, match.index));
    nodes.push(el("span", { class: kind }, match[0]));
    last = match.index + match[0].length;
  }
  nodes.push(code.slice(last));
  return nodes;
}

function pattern(language) {
  const comments = [];
  if (HASH.has(language)) comments.push(String.raw`(?<=^|\s)#[^\n]*`);
  if (SLASHES.has(language))
    comments.push(
      String.raw`\/\*[^]*?(?:\*\/|$(?![^]))`,
      ...(language === "css" ? [] : [String.raw`(?<!:)\/\/[^\n]*`]),
    );
  if (language === "sql") comments.push(String.raw`--[^\n]*`);
  if (language === "markup") comments.push(String.raw`<!--[^]*?(?:-->|$(?![^]))`);
  const strings = [DOUBLE];
  if (language === "python")
    strings.unshift(String.raw`"""[^]*?(?:"""|$(?![^]))`, String.raw`'''[^]*?(?:'''|$(?![^]))`);
  if (language === "javascript" || language === "go") strings.push("`(?:\\\\[^]|[^`\\\\])*`?");
  // In Rust ' begins a lifetime, in text it is an apostrophe.
  if (language !== "rust" && language !== "markup") strings.push(SINGLE);
  const names = language === "markup" ? String.raw`(?<=<\/?)[\w:-]+` : NAME;
  const comment = comments.length ? `(?<comment>${comments.join("|")})|` : "";
  return new RegExp(`${comment}(?<string>${strings.join("|")})|(?<number>${NUMBER})|(?<word>${names})`, "gmu");
}

function kindOf({ groups, index, 0: text }, language, code) {
  if (groups.comment) return "comment";
  if (groups.string)
    return language === "json" && /^\s*:/.test(code.slice(index + text.length, index + text.length + 20))
      ? "name"
      : "string";
  if (groups.number) return "number";
  if (language === "markup") return "keyword";
  const word = language === "sql" ? text.toLowerCase() : text;
  if (WORDS[language].has(word)) return "keyword";
  const after = code.slice(index + text.length, index + text.length + 2);
  if (after.startsWith("(") || (language === "yaml" && after.startsWith(":"))) return "name";
  return null;
}
