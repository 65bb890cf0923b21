// Markdown to DOM nodes. Text from a model only ever becomes text nodes and the elements made here: no HTML is parsed.

const DEPTH = 12; // lists in quotes in lists: deeper is shown as text

/** Shows `text` in `container`. Blocks that are as they were keep their nodes, so a growing text is cheap to show. */
export function render(container, text) {
    const shown = (container.blocks ??= []);
    const blocks = parse(text.replace(/\r\n?/g, "\n").split("\n"));
    let same = 0;
    while (same < blocks.length && same < shown.length && shown[same] === blocks[same].source) same++;
    while (container.childNodes.length > same) container.lastChild.remove();
    for (const block of blocks.slice(same)) container.append(build(block, 0));
    container.blocks = blocks.map((block) => block.source);
}

export function element(name, properties = {}, ...children) {
    const node = Object.assign(document.createElement(name), properties);
    // One by one: as arguments of one call they would all have to fit on the stack.
    for (const child of children.flat()) node.append(child);
    return node;
}

// Blocks

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;

function parse(lines) {
    const blocks = [];
    for (let i = 0; i < lines.length; ) {
        if (!lines[i].trim()) {
            i++;
            continue;
        }
        const [block, end] = fence(lines, i) ?? line(lines, i) ?? quote(lines, i) ?? list(lines, i) ?? table(lines, i)
            ?? paragraph(lines, i);
        block.source = lines.slice(i, end).join("\n");
        blocks.push(block);
        i = end;
    }
    return blocks;
}

function fence(lines, at) {
    const open = FENCE.exec(lines[at]);
    if (!open) return null;
    const indent = lines[at].search(/\S/);
    let end = at + 1;
    const [marks, mark] = [open[1], open[1][0]];
    const closes = (text) => text.startsWith(marks) && !text.replaceAll(mark, "");
    while (end < lines.length && !closes(lines[end].trim())) end++;
    const body = lines.slice(at + 1, end).map((text) => text.slice(Math.min(indent, text.search(/\S|$/))));
    const language = open[2].trim().split(/\s/)[0];
    return [{ kind: "code", language, text: body.join("\n") }, Math.min(end + 1, lines.length)];
}

function line(lines, at) {
    const heading = HEADING.exec(lines[at]);
    if (heading) {
        const [, marks, text] = heading;
        return [{ kind: "heading", level: marks.length, text: text.trim().replace(/ #+$/, "") }, at + 1];
    }
    return RULE.test(lines[at]) ? [{ kind: "rule" }, at + 1] : null;
}

function quote(lines, at) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    if (end === at) return null;
    return [{ kind: "quote", lines: lines.slice(at, end).map((text) => text.replace(QUOTE, "")) }, end];
}

function list(lines, at) {
    const first = ITEM.exec(lines[at]);
    if (!first) return null;
    const ordered = /\d/.test(first[2]);
    const base = first[1].length;
    const items = [];
    let end = at;
    while (end < lines.length) {
        const item = ITEM.exec(lines[end]);
        const indent = lines[end].search(/\S|$/);
        if (item && indent <= base + 1 && indent >= base - 1) {
            if (/\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
            const content = lines[end].slice(item[0].length);
            items.push({ width: Math.min(item[0].length, indent + item[2].length + 1), lines: [content] });
        } else if (!lines[end].trim()) {
            const next = lines[end + 1] ?? "";
            const goesOn = !next.trim() || next.search(/\S/) > base + 1 || ITEM.test(next);
            if (!goesOn || end + 1 === lines.length) break;
            items.at(-1).lines.push("");
        } else if (indent > base + 1 || (!startsBlock(lines[end]) && items.at(-1).lines.at(-1))) {
            items.at(-1).lines.push(lines[end].slice(Math.min(indent, items.at(-1).width)));
        } else {
            break;
        }
        end++;
    }
    return [{ kind: "list", ordered, start: parseInt(first[2]), items: items.map((item) => item.lines) }, end];
}

function table(lines, at) {
    const delimiters = lines[at + 1] ?? "";
    if (!lines[at].includes("|") || !delimiters.includes("|")) return null;
    if (!cells(delimiters).every((cell) => /^:?-+:?$/.test(cell))) return null;
    const side = (cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right");
    const align = cells(delimiters).map(side);
    const head = cells(lines[at]);
    if (head.length !== align.length) return null;
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end++;
    const rows = lines.slice(at + 2, end).map((text) => cells(text));
    return [{ kind: "table", align, head, rows }, end];
}

function cells(row) {
    const inner = row.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
    return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end++;
    return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

function startsBlock(text) {
    return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(text));
}

function build(block, depth) {
    switch (block.kind) {
        case "code":
            return code(block);
        case "heading":
            // The page's own headings are above these.
            return element(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text));
        case "rule":
            return element("hr");
        case "quote":
            return element("blockquote", {}, nested(block.lines, depth));
        case "list": {
            const items = block.items.map((lines) => element("li", {}, nested(lines, depth)));
            return element(block.ordered ? "ol" : "ul", block.ordered ? { start: block.start } : {}, items);
        }
        case "table":
            return tableOf(block);
        default:
            return element("p", {}, inline(block.text));
    }
}

function nested(lines, depth) {
    if (depth >= DEPTH) return [lines.join("\n")];
    const blocks = parse(lines);
    // A list of plain lines reads better without paragraphs.
    if (blocks[0]?.kind === "paragraph" && blocks.filter((block) => block.kind === "paragraph").length === 1) {
        return [...inline(blocks[0].text), ...blocks.slice(1).map((block) => build(block, depth + 1))];
    }
    return blocks.map((block) => build(block, depth + 1));
}

function code({ language, text }) {
    const copy = element("button", { className: "quiet copy", type: "button" }, "Copy");
    copy.addEventListener("click", () => copyText(copy, text));
    const label = element("span", {}, language || "text");
    const body = element("pre", { tabIndex: 0 }, element("code", {}, text));
    return element("div", { className: "code" }, element("div", { className: "bar" }, label, copy), body);
}

/** Copies a text and says so on the button. */
export async function copyText(button, text) {
    const label = button.textContent;
    let done = "Copied";
    try {
        await navigator.clipboard.writeText(text);
    } catch {
        // Without TLS there is no clipboard but the old one.
        const area = element("textarea", { value: text });
        document.body.append(area);
        area.select();
        done = document.execCommand("copy") ? done : "Not copied";
        area.remove();
    }
    button.textContent = done;
    setTimeout(() => (button.textContent = label), 1500);
}

function tableOf({ align, head, rows }) {
    const row = (name, texts) =>
        element("tr", {}, align.map((side, i) => element(name, { className: side }, inline(texts[i] ?? ""))));
    const body = rows.map((texts) => row("td", texts));
    const all = element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, body));
    return element("div", { className: "table", tabIndex: 0 }, all);
}

// Text within a block

const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
// In parentheses: an address, which may have pairs of parentheses itself, and perhaps a title.
const TARGET = /^\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const SPECIAL = /[\\`*_~[!\n]|https?:\/\//g;

function inline(text, depth = 0) {
    if (depth > DEPTH) return [text];
    const nodes = [];
    const unclosed = new Set(); // marks that nothing closes from here on: searched once, not at every opening
    let plain = "";
    const put = (...made) => {
        if (plain) nodes.push(plain);
        plain = "";
        nodes.push(...made);
    };
    for (let at = 0; at < text.length; ) {
        SPECIAL.lastIndex = at;
        const next = SPECIAL.exec(text)?.index ?? text.length;
        plain += text.slice(at, next);
        at = next;
        if (at === text.length) break;
        const found = escape(text, at) ?? span(text, at, unclosed) ?? link(text, at, depth)
            ?? address(text, at) ?? emphasis(text, at, unclosed, depth);
        if (!found) {
            plain += text[at++];
        } else if (typeof found.node === "string") {
            plain += found.node;
            at = found.end;
        } else {
            put(found.node);
            at = found.end;
        }
    }
    put();
    return nodes;
}

function escape(text, at) {
    if (text[at] === "\n") return { node: element("br"), end: at + 1 };
    const isEscape = text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "");
    return isEscape ? { node: text[at + 1], end: at + 2 } : null;
}

function span(text, at, unclosed) {
    if (text[at] !== "`") return null;
    const ticks = /^`+/.exec(text.slice(at, at + 32))[0];
    const end = find(text, ticks, at + ticks.length, unclosed);
    if (end < 0) return { node: ticks, end: at + ticks.length };
    const content = text.slice(at + ticks.length, end).replaceAll("\n", " ");
    // A space at both ends is there for a code that begins or ends with a backtick.
    const isPadded = content.trim() && content.startsWith(" ") && content.endsWith(" ");
    return { node: element("code", {}, isPadded ? content.slice(1, -1) : content), end: end + ticks.length };
}

function link(text, at, depth) {
    const open = text.startsWith("![", at) ? at + 1 : at;
    if (text[open] !== "[") return null;
    const near = text.slice(open + 1, open + 3000);
    const middle = near.indexOf("](");
    const label = near.slice(0, middle);
    if (middle < 0 || label.includes("[")) return null;
    const target = TARGET.exec(near.slice(middle + 1));
    if (!target) return null;
    const end = open + 1 + middle + 1 + target[0].length;
    // Pictures are not fetched: the page asks nobody but its own server.
    const node = anchor(target[1], inline(label || target[1], Math.max(depth + 1, DEPTH - 2)));
    return { node: node ?? text.slice(at, end), end };
}

function address(text, at) {
    const found = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + 2000));
    if (!found) return null;
    let url = found[0].replace(/[.,;:!?*_~]+$/, "");
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
    const node = anchor(url, [url]);
    return node && { node, end: at + url.length };
}

function anchor(href, children) {
    let url;
    try {
        url = new URL(href);
    } catch {
        return null;
    }
    if (url.protocol !== "http:" && url.protocol !== "https:") return null;
    return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function emphasis(text, at, unclosed, depth) {
    const mark = MARKS[text.slice(at, at + 2)] ? text.slice(at, at + 2) : text[at];
    const start = at + mark.length;
    const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);
    const isSpace = (c) => c === undefined || /\s/.test(c);
    if (!MARKS[mark] || isSpace(text[start]) || (mark[0] === "_" && isWord(text[at - 1]))) return null;
    let end = find(text, mark, start + 1, unclosed);
    for (let tries = 0; end > 0 && tries < 50; tries++) {
        let run = mark.length;
        while (text[end + run] === mark[0]) run++;
        // Two of them are a mark of their own, three are both.
        const closes = mark.length === 2 || run % 2 === 1;
        if (closes && !isSpace(text[end - 1]) && !(mark[0] === "_" && isWord(text[end + run]))) {
            const last = end + run - mark.length;
            return { node: element(MARKS[mark], {}, inline(text.slice(start, last), depth + 1)), end: end + run };
        }
        end = find(text, mark, end + run, unclosed);
    }
    return null;
}

function find(text, what, from, unclosed) {
    if (unclosed.has(what)) return -1;
    const at = text.indexOf(what, from);
    if (at < 0) unclosed.add(what);
    return at;
}
