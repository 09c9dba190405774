// One key or value in full: as JSON if it is JSON, as text, in hex or in base64.

import { h } from "./dom.js";
import { bytes } from "./format.js";

const HEX_BYTES_MAX = 16 * 1024;
const chosen = new Map(); // The format that the user chose last, by content.

export function payloadView(title, content, key, draw, loadWhole) {
  if (content === null || content === undefined) return h("div", { class: "content", "data-key": title }, h("h3", null, title), h("p", { class: "null" }, "null"));
  const formats = formatsOf(content);
  const format = formats.includes(chosen.get(key)) ? chosen.get(key) : formats[0];
  return h("div", { class: "content", "data-key": title },
    h("h3", null, title, h("span", { class: "muted" }, bytes(content.size_bytes)),
      h("span", { class: "formats", role: "group", "aria-label": `${title} as` },
        formats.map((one) => h("button", { type: "button", "aria-pressed": String(one === format), onclick: () => { chosen.set(key, one); draw(); } }, one)))),
    h("pre", { tabindex: 0, "aria-label": `${title} as ${format}` }, rendered(content, format)),
    content.is_cut && h("p", { class: "muted" }, "Only the first bytes are shown. ", h("button", { type: "button", onclick: loadWhole }, "Load more")));
}

function formatsOf(content) {
  if (content.encoding === "base64") return ["hex", "base64"];
  return content.is_cut || !isJson(content.data) ? ["text", "hex"] : ["JSON", "text", "hex"];
}

function rendered(content, format) {
  if (format === "JSON") return indented(content.data);
  if (format === "hex") return hex(content);
  return content.data;
}

function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// Indents JSON without parsing it, because parsing would round large numbers.
function indented(text) {
  let out = "";
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g)) {
    if (token === "{" || token === "[") {
      depth += 1;
      out += token + line();
    } else if (token === "}" || token === "]") {
      depth -= 1;
      const isEmpty = /[[{]\s*$/.test(out);
      out = isEmpty ? out.trimEnd() + token : out + line() + token;
    } else if (token === ",") out += token + line();
    else if (token === ":") out += ": ";
    else out += token;
  }
  return out;
}

function hex(content) {
  const data = content.encoding === "base64" ? Uint8Array.from(atob(content.data), (one) => one.charCodeAt(0)) : new TextEncoder().encode(content.data);
  const shown = data.subarray(0, HEX_BYTES_MAX);
  const lines = [];
  for (let at = 0; at < shown.length; at += 16) {
    const part = [...shown.subarray(at, at + 16)];
    const codes = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const letters = part.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${letters}`);
  }
  if (data.length > shown.length) lines.push("…");
  return lines.join("\n");
}
