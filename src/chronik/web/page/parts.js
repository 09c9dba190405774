// Elements that several views share.

import { h } from "./dom.js";
import { leave } from "./session.js";

export const badge = (tone, text, title) => h("span", { class: `badge ${tone}`, title }, text);

export const panel = (title, props, ...children) =>
  h("section", { class: `panel ${props?.class ?? ""}`, "data-key": props?.key ?? title, "aria-label": title },
    h("header", null, h("h2", null, title), props?.aside), children);

export const empty = (...text) => h("p", { class: "empty" }, text);

export const figure = (title, value, tone = "", plot = null) =>
  h("div", { class: `figure ${tone}` }, h("dt", null, title), h("dd", null, h("span", { class: "value" }, value), plot));

export const groupState = ({ state }) => badge(state === "Stable" ? "ok" : state === "Empty" ? "" : "warn", state);

// A table whose rows become cards on a phone. Columns: {title, number, class, cell: (row) => node}; `key` names a row.
// `group` names the group of a row, whose rows get a heading; rows of a group are adjacent.
export function table(caption, columns, rows, key, group = () => null) {
  const shape = (column) => [column.number && "number", column.class].filter(Boolean).join(" ") || null;
  const heading = (row, at) => {
    const name = group(row);
    if (name === null || (at && group(rows[at - 1]) === name)) return null;
    return h("tr", { class: "group", "data-key": `group-${name}` }, h("th", { scope: "colgroup", colspan: columns.length }, name));
  };
  return h("div", { class: "scroll" },
    h("table", null,
      h("caption", null, caption),
      h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: shape(column) }, column.title)))),
      h("tbody", null,
        rows.map((row, number) => [
          heading(row, number),
          h("tr", { "data-key": key(row) },
            columns.map((column, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: shape(column), "data-label": column.title }, column.cell(row)))),
        ]))));
}

export const nodes = (replicas, isr, leader) =>
  h("span", { class: "replicas" },
    replicas.map((id) => {
      const isIn = isr.includes(id);
      const label = `node ${id}${id === leader ? ", leader" : ""}${isIn ? ", in sync" : ", not in sync"}`;
      return h("span", { class: `replica ${isIn ? "in" : "out"} ${id === leader ? "leads" : ""}`, title: label, "aria-label": label, role: "img" }, id);
    }));

export const error = (line) => h("p", { class: "notice bad", role: "alert" }, line);

export async function getJson(path) {
  let response;
  try {
    response = await fetch(path);
  } catch {
    throw new Error("this node did not answer: retry when it is back");
  }
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) leave();
  if (!response.ok) throw new Error(body.error ?? body.message ?? `the node answered ${response.status}`);
  return body;
}
