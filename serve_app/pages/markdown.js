"use strict";

// Markdown as DOM nodes. A model's text is never read as HTML, and it loads nothing: it has no images.
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const INLINE = /(?<!`)(`{1,3})(?!`)(.+?)(?<!`)\1(?!`)|\*\*(.+?)\*\*|\*(?=\S)(.+?)\*|\[([^[\]]+)\]\((https?:\/\/[^\s)]+)\)/;
const MAX_DEPTH = 6;

function kindOf(line) {
  if (/^\s*$/.test(line)) return "blank";
  if (FENCE.test(line)) return "code";
  if (/^#{1,6}\s/.test(line)) return "heading";
  if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (/^\s*>/.test(line)) return "quote";
  return /^\s*\|.*\|\s*$/.test(line) ? "table" : "paragraph";
}

// Blocks of a text; those before the last line stay the same while the text grows.
function blocksOf(text) {
  const blocks = [];
  let block = null, wasBlank = false;
  for (const line of text.split("\n")) {
    if (block?.fence) {
      if (line.trim().startsWith(block.fence) && FENCE.exec(line)?.[2] === "") block = null;
      else block.lines.push(line);
      continue;
    }
    const kind = kindOf(line);
    const continues = block && (block.kind === kind ? !wasBlank || kind === "list" : block.kind === "list" &&
      (kind === "paragraph" || kind === "table") && (!wasBlank || /^\s{2,}/.test(line)));
    if (kind === "blank") wasBlank = true;
    else if (continues && kind !== "heading" && kind !== "rule" && kind !== "code") block.lines.push(line);
    else {
      const [, fence, language] = kind === "code" ? FENCE.exec(line) : [];
      block = {kind, fence, language, lines: kind === "code" ? [] : [line]};
      blocks.push(block);
    }
    wasBlank = kind === "blank";
  }
  return blocks;
}

function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    const [, , code, bold, emphasis, label, address] = match;
    let node;
    if (code !== undefined) node = element("code", "", code);
    else if (address) {
      node = element("a", "", label);
      Object.assign(node, {href: address, target: "_blank", rel: "noopener noreferrer"});
    } else {
      node = element(bold ? "strong" : "em");
      node.append(...inline(bold ?? emphasis));
    }
    nodes.push(text.slice(0, match.index), node);
  }
  return [...nodes, text];
}

function filled(name, text) {
  const made = element(name);
  made.append(...inline(text));
  return made;
}

function listOf(lines) {
  const open = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      open.at(-1).node.lastElementChild.append(" ", ...inline(line.trim()));
      continue;
    }
    const [, {length: indent}, marker, text] = item;
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || (indent > open.at(-1).indent + 1 && open.length < MAX_DEPTH)) {
      const isOrdered = /\d/.test(marker), node = element(isOrdered ? "ol" : "ul");
      if (isOrdered) node.start = parseInt(marker, 10);
      open.at(-1)?.node.lastElementChild.append(node);
      open.push({indent, node});
    }
    open.at(-1).node.append(filled("li", text));
  }
  return open[0].node;
}

function scrolling(name, className) {
  const made = element(name, className);
  made.tabIndex = 0;
  return made;
}

function codeOf(text, language) {
  const made = element("div", "code"), pre = scrolling("pre"), bar = element("div", "code-bar");
  bar.append(element("span", "", language || "code"));
  // Browsers offer the clipboard over HTTPS and on this machine alone.
  if (navigator.clipboard) bar.append(button("plain", "Copy", () => navigator.clipboard.writeText(text)));
  pre.append(element("code", "", text));
  made.append(bar, pre);
  return made;
}

function tableOf(lines) {
  const frame = scrolling("div", "table"), table = element("table");
  const rows = lines.map(line => line.trim().slice(1, -1).split("|").map(cell => cell.trim()));
  const hasHead = rows[1]?.every(cell => /^:?-+:?$/.test(cell));
  rows.forEach((cells, index) => {
    if (hasHead && index === 1) return;
    const row = element("tr");
    row.append(...cells.map(cell => filled(hasHead && index === 0 ? "th" : "td", cell)));
    table.append(row);
  });
  frame.append(table);
  return frame;
}

function nodeOf({kind, lines, language}, depth) {
  const text = lines.join("\n");
  if (kind === "code") return codeOf(text, language);
  if (kind === "list") return listOf(lines);
  if (kind === "table") return tableOf(lines);
  if (kind === "rule") return element("hr");
  if (kind === "heading") return filled("h3", text.replace(/^#+\s+|\s+#+\s*$/g, ""));
  if (kind !== "quote" || depth > MAX_DEPTH) return filled("p", text);
  const made = element("blockquote");
  renderMarkdown(made, text.replace(/^\s*> ?/gm, ""), depth + 1);
  return made;
}

// Show a text; a block that has not changed keeps its node, so that a selection stays while the text grows.
function renderMarkdown(container, text, depth = 1) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const old = container.children[index], source = JSON.stringify(block);
    if (old?.source === source) return;
    const made = nodeOf(block, depth);
    made.source = source;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}
