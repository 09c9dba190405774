// The subjects of the schema registry, and the versions of one subject with their differences. Read-only.

import { h } from "./dom.js";
import { plural } from "./format.js";
import { badge, empty, error, figure, getJson, panel, table } from "./parts.js";

const FRESH_MS = 5000;
const LINES_MAX = 2000; // Longer texts are shown without a comparison, which would take too long.
const SHOWN_MAX = 1000; // Subjects in the list.

const part = encodeURIComponent;
const address = (...parts) => `#/schemas/${parts.map(part).join("/")}`;
const typeOf = (version) => ({ JSON: "JSON Schema", PROTOBUF: "Protobuf" })[version.schemaType] ?? "Avro";

// Loads again when the data is old: views are drawn every second.
function loader(load, redraw) {
  let at = 0;
  let isLoading = false;
  const known = { data: null, failure: null };
  return () => {
    if (!isLoading && Date.now() - at > FRESH_MS) {
      isLoading = true;
      load()
        .then((data) => Object.assign(known, { data, failure: null }), (reason) => Object.assign(known, { failure: reason.message }))
        .finally(() => {
          at = Date.now();
          isLoading = false;
          redraw();
        });
    }
    return known;
  };
}

export function schemas(redraw) {
  let wanted = "";
  const current = loader(async () => {
    const [latest, config] = await Promise.all([getJson("/schemas?latestOnly=true"), getJson("/config")]);
    return { latest, level: config.compatibilityLevel };
  }, redraw);
  return { title: "Schemas", query: "", draw: () => [h("h1", null, "Schemas"), list(current())] };

  function list({ data, failure }) {
    if (!data) return failure ? error(failure) : empty("Waiting for the registry.");
    const found = data.latest.filter((line) => line.subject.toLowerCase().includes(wanted));
    const columns = [
      { title: "Subject", class: "name", cell: (line) => h("a", { href: address(line.subject) }, line.subject) },
      { title: "Type", cell: (line) => badge("", typeOf(line)) },
      { title: "Latest version", number: true, cell: (line) => line.version },
      { title: "Id", number: true, cell: (line) => line.id },
      { title: "References", number: true, cell: (line) => line.references?.length ?? 0 },
    ];
    const search = h("input", { type: "search", "data-static": true, "aria-label": "Search subjects", placeholder: "Search subjects", oninput: (event) => { wanted = event.target.value.toLowerCase(); redraw(); } });
    return [
      failure && error(failure),
      h("dl", { class: "figures" }, figure("Subjects", data.latest.length), figure("Compatibility level", data.level)),
      panel("Subjects", { aside: data.latest.length > 1 && search },
        found.length
          ? table("Subjects", columns, found.slice(0, SHOWN_MAX), (line) => line.subject)
          : empty(wanted ? "No subject has this in its name." : "There are no schemas. A serializer registers them, or: chronik schema register SUBJECT FILE."),
        found.length > SHOWN_MAX && empty(`${found.length - SHOWN_MAX} more: search for a part of the name.`)),
    ];
  }
}

export function schema(name, number, other, redraw) {
  const path = `/subjects/${part(name)}/versions`;
  const current = loader(async () => {
    const [numbers, config] = await Promise.all([getJson(path), getJson(`/config/${part(name)}?defaultToGlobal=true`)]);
    const shown = numbers.includes(number) ? number : numbers[numbers.length - 1];
    const compared = other !== shown && numbers.includes(other) ? other : null;
    const [version, against] = await Promise.all([getJson(`${path}/${shown}`), compared && getJson(`${path}/${compared}`)]);
    return { numbers, level: config.compatibilityLevel, version, against };
  }, redraw);
  return {
    title: name,
    query: "",
    draw: () => [h("p", { class: "crumbs" }, h("a", { href: "#/schemas" }, "Schemas")), h("div", { class: "title" }, h("h1", null, name)), body(current())],
  };

  function body({ data, failure }) {
    if (!data) return failure ? error(failure) : empty("Waiting for the registry.");
    const { numbers, version, against, level } = data;
    const chips = (title, choices, current, to) =>
      h("nav", { class: "chips", "aria-label": title }, h("span", { class: "muted" }, title),
        choices.map((each) => h("a", { href: to(each), "aria-current": each === current ? "true" : null }, each)));
    const others = ["nothing", ...numbers.filter((each) => each !== version.version)];
    const references = (version.references ?? []).map((each) => [h("a", { href: address(each.subject, each.version) }, `${each.name} (${each.subject} ${each.version})`), " "]);
    return [
      failure && error(failure),
      h("dl", { class: "figures" },
        figure("Type", typeOf(version)), figure("Id", version.id), figure("Versions", numbers.length), figure("Compatibility level", level)),
      panel(`Version ${version.version}`, { key: "version", aside: against && h("span", { class: "muted" }, `compared with version ${against.version}`) },
        h("div", { class: "choices" },
          chips("Version", numbers, version.version, (each) => address(name, each)),
          numbers.length > 1 && chips("Compare with", others, against?.version ?? "nothing", (each) => (each === "nothing" ? address(name, version.version) : address(name, version.version, each)))),
        references.length > 0 && h("p", { class: "muted choices" }, plural(references.length, "reference"), ": ", references),
        text(version, against)),
    ];
  }
}

function text(version, against) {
  const lines = pretty(version.schema);
  const before = against && pretty(against.schema);
  if (!before) return h("pre", { class: "schema", tabindex: 0 }, lines.join("\n"));
  if (lines.length > LINES_MAX || before.length > LINES_MAX) return [empty("The schemas are too long to be compared here."), h("pre", { class: "schema", tabindex: 0 }, lines.join("\n"))];
  const changes = difference(before, lines);
  if (changes.every(([sign]) => sign === " ")) return [empty("Both versions have the same text."), h("pre", { class: "schema", tabindex: 0 }, lines.join("\n"))];
  return h("pre", { class: "schema diff", tabindex: 0 },
    changes.map(([sign, line]) => h("span", { class: { "+": "added", "-": "removed" }[sign] ?? null }, `${sign} ${line}\n`)));
}

function pretty(schema) {
  try {
    return JSON.stringify(JSON.parse(schema), null, 2).split("\n");
  } catch {
    return schema.replace(/\n$/, "").split("\n"); // Protobuf
  }
}

// The lines of both texts with their sign: the longest common subsequence is unchanged.
function difference(before, after) {
  const width = after.length + 1;
  const lengths = new Uint16Array((before.length + 1) * width);
  for (let i = before.length - 1; i >= 0; i -= 1) {
    for (let j = after.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = before[i] === after[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && before[i] === after[j]) {
      found.push([" ", after[j]]);
      i += 1;
      j += 1;
    } else if (i < before.length && (j >= after.length || lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      found.push(["-", before[i]]);
      i += 1;
    } else {
      found.push(["+", after[j]]);
      j += 1;
    }
  }
  return found;
}
