// One key or value in full: as JSON where it is JSON, as text, in hex or in base64.

import { h } from "./dom.js";
import { bytes } from "./format.js";

const HEX_BYTES_MAX = 16 * 1024;
const chosen = new Map(); // Which way a person looked at it last, by content.

export function contentView(title, content, key, draw, loadWhole) {
  if (content === null || content === undefined) return h("div", { class: "content", "data-key": title }, h("h3", null, title), h("p", { class: "null" }, "null"));
  const ways = waysOf(content);
  const way = ways.includes(chosen.get(key)) ? chosen.get(key) : ways[0];
  return h("div", { class: "content", "data-key": title },
    h("h3", null, title, h("span", { class: "muted" }, bytes(content.size_bytes)),
      h("span", { class: "ways", role: "group", "aria-label": `${title} as` },
        ways.map((one) => h("button", { type: "button", "aria-pressed": String(one === way), onclick: () => { chosen.set(key, one); draw(); } }, one)))),
    h("pre", { tabindex: 0, "aria-label": `${title} as ${way}` }, rendered(content, way)),
    content.is_cut && h("p", { class: "muted" }, "This is its beginning. ", h("button", { type: "button", onclick: loadWhole }, "Read more of it")));
}

function waysOf(content) {
  if (content.encoding === "base64") return ["hex", "base64"];
  return content.is_cut || !isJson(content.data) ? ["text", "hex"] : ["JSON", "text", "hex"];
}

function rendered(content, way) {
  if (way === "JSON") return indented(content.data);
  if (way === "hex") return hex(content);
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

// JSON with its own literals: parsing it would change numbers that do not fit.
export function indented(text) {
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
