// Pieces that several views show alike.

import { h } from "./dom.js";

export const badge = (tone, text, title) => h("span", { class: `badge ${tone}`, title }, text);

export const panel = (title, props, ...children) =>
  h("section", { class: `panel ${props?.class ?? ""}`, "data-key": props?.key ?? title, "aria-label": title },
    h("header", null, h("h2", null, title), props?.aside), children);

export const empty = (...said) => h("p", { class: "empty" }, said);

// A table whose rows become cards on a phone. Columns: {title, number, class, cell: (row) => node}; `key` names a row.
export function table(caption, columns, rows, key) {
  const shape = (column) => [column.number && "number", column.class].filter(Boolean).join(" ") || null;
  return h("div", { class: "scroll" },
    h("table", null,
      h("caption", null, caption),
      h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: shape(column) }, column.title)))),
      h("tbody", null,
        rows.map((row) =>
          h("tr", { "data-key": key(row) },
            columns.map((column, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: shape(column), "data-label": column.title }, column.cell(row))))))));
}

export const nodes = (replicas, isr, leader) =>
  h("span", { class: "replicas" },
    replicas.map((id) => {
      const isIn = isr.includes(id);
      const said = `node ${id}${id === leader ? ", leads" : ""}${isIn ? ", in sync" : ", not in sync"}`;
      return h("span", { class: `replica ${isIn ? "in" : "out"} ${id === leader ? "leads" : ""}`, title: said, "aria-label": said, role: "img" }, id);
    }));

export const error = (line) => h("p", { class: "notice bad", role: "alert" }, line);

export async function ask(path) {
  let response;
  try {
    response = await fetch(path);
  } catch {
    throw new Error("this node did not answer: it will be tried again when it is back");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `the node answered ${response.status}`);
  return body;
}
