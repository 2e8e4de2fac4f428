// Markdown to a tree of plain objects, and the tree to DOM nodes. Text of a model becomes text nodes alone:
// no string is ever parsed as HTML, and links go to http, https and mailto only. Time is linear in the text,
// because looking for the end of a span is bounded.

const SPAN_LIMIT = 4000;
const MAX_DEPTH = 12;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;

/** Blocks of a text: [{type, ...}], of types heading, code, list, quote, rule, table and paragraph. */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = block_at(lines, at, depth);
    found.push(block);
    at = next;
  }
  return found;
}

function block_at(lines, at, depth) {
  const line = lines[at];
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, children: inline(heading[2]) }, at + 1];
  if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (/^ {0,3}>/.test(line)) return quote(lines, at, depth);
    if (marker(line)) return list(lines, at, depth);
  }
  if (line.includes("|") && is_delimiter_row(lines[at + 1])) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fenced(lines, at, fence) {
  const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  const body = [];
  let next = at + 1;
  while (next < lines.length && !end.test(lines[next])) body.push(lines[next++]);
  // One that is not closed is still being written.
  return [{ type: "code", language: fence[2].trim().split(/\s/)[0], text: body.join("\n") }, next + 1];
}

function quote(lines, at, depth) {
  const inner = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) inner.push(lines[at++].replace(/^ {0,3}> ?/, ""));
  return [{ type: "quote", children: blocks(inner, depth + 1) }, at];
}

function marker(line) {
  const found = /^( {0,3})([-*+]|(\d{1,9})[.)])( +|$)/.exec(line);
  if (!found || /^ {0,3}([-*_])( *\1){2,} *$/.test(line)) return null;
  const spaces = found[4].length > 4 ? 1 : Math.max(found[4].length, 1);
  return {
    ordered: found[3] !== undefined,
    start: found[3] === undefined ? 1 : Number(found[3]),
    width: found[1].length + found[2].length + spaces,
  };
}

function list(lines, at, depth) {
  const first = marker(lines[at]);
  const items = [];
  while (at < lines.length) {
    const mark = marker(lines[at]);
    if (!mark || mark.ordered !== first.ordered) break;
    const inner = [lines[at].slice(mark.width)];
    at += 1;
    while (at < lines.length && belongs(lines, at, mark.width)) {
      inner.push(lines[at].slice(Math.min(mark.width, indent(lines[at]))));
      at += 1;
    }
    items.push(blocks(inner, depth + 1));
    let ahead = at;
    while (ahead < lines.length && !lines[ahead].trim()) ahead += 1;
    if (ahead < lines.length && marker(lines[ahead])) at = ahead;
  }
  return [{ type: "list", ordered: first.ordered, start: first.start, items }, at];
}

const indent = (line) => line.length - line.trimStart().length;

// Whether a line is of the item before it: indented, its lazy continuation, or empty with more behind it.
function belongs(lines, at, width) {
  const line = lines[at];
  if (line.trim()) {
    if (indent(line) >= Math.min(width, 2)) return true;
    return Boolean(lines[at - 1].trim()) && !starts_block(line);
  }
  const next = lines[at + 1];
  return next !== undefined && Boolean(next.trim()) && indent(next) >= Math.min(width, 2);
}

const starts_block = (line) => /^ {0,3}(#{1,6}\s|>|`{3,}|~{3,})/.test(line) || marker(line) !== null;

function is_delimiter_row(line) {
  return line !== undefined && line.includes("-") && /^ *\|?( *:?-+:? *\|)* *:?-+:? *\|? *$/.test(line);
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => inline(cell.trim().replace(/\\\|/g, "|")));

function table(lines, at) {
  const head = cells(lines[at]);
  const rows = [];
  at += 2;
  while (at < lines.length && lines[at].includes("|") && lines[at].trim()) rows.push(cells(lines[at++]));
  return [{ type: "table", head, rows }, at];
}

function paragraph(lines, at, depth) {
  const inner = [lines[at++]];
  while (at < lines.length && lines[at].trim() && !(depth < MAX_DEPTH && starts_block(lines[at]))) {
    if (lines[at].includes("|") && is_delimiter_row(lines[at + 1])) break;
    inner.push(lines[at++]);
  }
  return [{ type: "paragraph", children: inline(inner.join("\n").trim()) }, at];
}

/** Spans of a text: [{type, ...}], of types text, code, strong, em, strike, link and break. */
export function inline(text, depth = 0) {
  const found = [];
  let plain = "";
  let at = 0;
  const add = (span, next) => {
    if (plain) found.push({ type: "text", text: plain });
    plain = "";
    found.push(span);
    at = next;
  };
  while (at < text.length) {
    const span = depth < MAX_DEPTH ? span_at(text, at, depth) : null;
    if (span) add(...span);
    else if (text[at] === "\\" && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) {
      plain += text[at + 1];
      at += 2;
    } else plain += text[at++];
  }
  if (plain) found.push({ type: "text", text: plain });
  return found;
}

function span_at(text, at, depth) {
  switch (text[at]) {
    case "`":
      return code_span(text, at);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth);
    case "!":
      return text[at + 1] === "[" ? link(text, at + 1, depth) : null;
    case "[":
      return link(text, at, depth);
    case "<":
      return autolink(text, at);
    case "h":
      return bare_link(text, at);
    case " ":
      return text.startsWith("  \n", at) ? [{ type: "break" }, at + 3] : null;
    case "\\":
      return text[at + 1] === "\n" ? [{ type: "break" }, at + 2] : null;
    default:
      return null;
  }
}

function code_span(text, at) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const ticks = "`".repeat(width);
  const end = find(text, at + width, (place) => {
    return text.startsWith(ticks, place) && text[place + width] !== "`" && text[place - 1] !== "`";
  });
  if (end < 0) return [{ type: "text", text: ticks }, at + width];
  let body = text.slice(at + width, end).replace(/\n/g, " ");
  if (body.length > 2 && body.startsWith(" ") && body.endsWith(" ")) body = body.slice(1, -1);
  return [{ type: "code", text: body }, end + width];
}

function find(text, from, is_end) {
  const last = Math.min(text.length, from + SPAN_LIMIT);
  for (let place = from; place < last; place += 1) if (is_end(place)) return place;
  return -1;
}

function emphasis(text, at, depth) {
  const character = text[at];
  const doubled = text[at + 1] === character;
  if (character === "~" && !doubled) return null;
  const mark = doubled ? character + character : character;
  const begin = at + mark.length;
  if (begin >= text.length || /\s/.test(text[begin])) return null;
  if (character === "_" && at > 0 && WORD.test(text[at - 1])) return null;
  const end = find(text, begin + 1, (place) => {
    if (!text.startsWith(mark, place) || /\s/.test(text[place - 1]) || text[place - 1] === "\\") return false;
    if (!doubled && (text[place + 1] === character || text[place - 1] === character)) return false;
    return character !== "_" || place + mark.length >= text.length || !WORD.test(text[place + mark.length]);
  });
  if (end < 0) return [{ type: "text", text: mark }, begin];
  const type = character === "~" ? "strike" : doubled ? "strong" : "em";
  return [{ type, children: inline(text.slice(begin, end), depth + 1) }, end + mark.length];
}

function link(text, at, depth) {
  let open = 0;
  const close = find(text, at, (place) => {
    if (text[place] === "[" && text[place - 1] !== "\\") open += 1;
    if (text[place] === "]" && text[place - 1] !== "\\") open -= 1;
    return open === 0;
  });
  if (close < 0 || text[close + 1] !== "(") return null;
  let inside = 0;
  const end = find(text, close + 1, (place) => {
    if (text[place] === "(") inside += 1;
    if (text[place] === ")") inside -= 1;
    return inside === 0;
  });
  if (end < 0) return null;
  const target = text.slice(close + 2, end).trim().replace(/\s+["'(].*$/, "").replace(/^<|>$/g, "");
  const label = text.slice(at + 1, close);
  const href = safe_url(target);
  const children = inline(label || target, depth + 1);
  return [href ? { type: "link", href, children } : { type: "span", children }, end + 1];
}

function autolink(text, at) {
  const found = /^<(https?:\/\/[^\s<>]{1,2000})>/i.exec(text.slice(at, at + 2010));
  const href = found && safe_url(found[1]);
  return href ? [{ type: "link", href, children: [{ type: "text", text: found[1] }] }, at + found[0].length] : null;
}

function bare_link(text, at) {
  if (at > 0 && WORD.test(text[at - 1])) return null;
  if (!text.startsWith("http://", at) && !text.startsWith("https://", at)) return null;
  const found = /^https?:\/\/[^\s<>"'`]{1,2000}/.exec(text.slice(at, at + 2010));
  const shown = found ? found[0].replace(/[.,;:!?)\]*_~]+$/, "") : "";
  const href = safe_url(shown);
  return href ? [{ type: "link", href, children: [{ type: "text", text: shown }] }, at + shown.length] : null;
}

/** The URL, where it is absolute and of a scheme that cannot run anything; else "". */
export function safe_url(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
}

// --- the tree as DOM nodes ------------------------------------------------------------------------------------

/** A fragment of the nodes of a Markdown text. `words` has the label of the button that copies code. */
export function render(text, words = { copy: "Copy" }) {
  const fragment = document.createDocumentFragment();
  fragment.append(...parse(text).map((block) => block_node(block, words)));
  return fragment;
}

function node(tag, children, attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function block_node(block, words) {
  const nested = (children) => children.map((each) => block_node(each, words));
  switch (block.type) {
    case "heading":
      // Beneath the headings of the page.
      return node(`h${Math.min(block.level + 2, 6)}`, spans(block.children));
    case "code":
      return code_node(block, words);
    case "quote":
      return node("blockquote", nested(block.children));
    case "rule":
      return node("hr", []);
    case "list": {
      const items = block.items.map((item) => node("li", tight(item, words)));
      return node(block.ordered ? "ol" : "ul", items, block.ordered ? { start: block.start } : {});
    }
    case "table":
      return table_node(block);
    default:
      return node("p", spans(block.children));
  }
}

// An item of one paragraph has no room around it.
const tight = (item, words) =>
  item.flatMap((each) => (each.type === "paragraph" ? spans(each.children) : [block_node(each, words)]));

function code_node(block, words) {
  const copy = node("button", [words.copy], { type: "button", class: "quiet copy" });
  copy.addEventListener("click", () => navigator.clipboard?.writeText(block.text));
  const head = node("div", [node("span", [block.language || "text"]), copy], { class: "code-head" });
  // What is wider than the page is scrolled, also by the keyboard.
  const body = node("pre", [node("code", [block.text])], { tabindex: "0" });
  return node("div", [head, body], { class: "code" });
}

function table_node(block) {
  const row = (cells, tag) => node("tr", cells.map((cell) => node(tag, spans(cell))));
  const head = node("thead", [row(block.head, "th")]);
  const body = node("tbody", block.rows.map((cells) => row(cells, "td")));
  return node("div", [node("table", [head, body])], { class: "scrolls", tabindex: "0" });
}

function spans(children) {
  return children.map((span) => {
    switch (span.type) {
      case "code":
        return node("code", [span.text]);
      case "strong":
        return node("strong", spans(span.children));
      case "em":
        return node("em", spans(span.children));
      case "strike":
        return node("s", spans(span.children));
      case "span":
        return node("span", spans(span.children));
      case "break":
        return node("br", []);
      case "link":
        return node("a", spans(span.children), {
          href: span.href,
          rel: "noopener noreferrer nofollow",
          target: "_blank",
        });
      default:
        return document.createTextNode(span.text);
    }
  });
}
