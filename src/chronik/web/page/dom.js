// Elements from plain calls, and bringing what is shown up to date without losing focus, selection or scroll.
// Text only ever becomes a text node: what a message holds is shown, never run.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "circle", "g", "title", "text"]);
const HANDLERS = ["onclick", "onsubmit", "onchange", "oninput", "ontoggle"];

export function h(tag, props, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Makes the children of `root` what is given, keeping every element that is still the same one.
export function show(root, ...children) {
  const fresh = document.createDocumentFragment();
  append(fresh, children);
  morphChildren(root, fresh);
}

function morphChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const match = key ? keyed.get(key) : at && !at.dataset?.key ? at : null;
    if (match && isSame(match, wanted)) {
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      morph(match, wanted);
    } else {
      old.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function isSame(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && old.dataset?.key === fresh.dataset?.key;
}

function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const name of HANDLERS) if (old[name] !== fresh[name]) old[name] = fresh[name];
  // What a person types or opens is theirs.
  if (old.hasAttribute("data-static")) return;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, fresh);
}
