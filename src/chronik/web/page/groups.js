// Consumer groups, and one of them with its members and how far each partition stands behind.

import { h } from "./dom.js";
import { compact, count, plural } from "./format.js";
import { recent } from "./history.js";
import { groupPanel, LAG_FLOOR } from "./overview.js";
import { badge, empty, error, panel, table } from "./parts.js";
import { spark } from "./spark.js";

const STANDS_MS = 10000;

export function groups() {
  return { title: "Groups", query: "groups=1", draw: (state) => [h("h1", null, "Groups"), groupPanel(state.groups)] };
}

export function group(name) {
  const moved = new Map(); // By partition: the committed offset, and since when it has been that one.
  return {
    title: name,
    query: `group=${encodeURIComponent(name)}`,
    heard(event, data) {
      if (event !== "group") return;
      for (const line of data.partitions ?? []) {
        const key = `${line.topic} ${line.partition}`;
        if (moved.get(key)?.committed !== line.committed) moved.set(key, { committed: line.committed, at: Date.now() });
      }
    },
    draw: ({ group: known }) => [
      h("p", { class: "crumbs" }, h("a", { href: "#/groups" }, "Groups")),
      h("div", { class: "title" }, h("h1", null, name), known?.state && badge(known.state === "Stable" ? "ok" : known.state === "Empty" ? "" : "warn", known.state)),
      known?.error ? error(known.error) : known ? body(known, moved) : empty("Asking its coordinator."),
    ],
  };
}

function body(known, moved) {
  const clients = new Map(known.members.map((member) => [member.member, member]));
  const standing = (line) => line.lag > 0 && Date.now() - (moved.get(`${line.topic} ${line.partition}`)?.at ?? Date.now()) > STANDS_MS;
  const columns = [
    { title: "Partition", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.topic)}` }, `${line.topic}-${line.partition}`) },
    { title: "Committed", number: true, cell: (line) => count(line.committed) },
    { title: "End", number: true, cell: (line) => count(line.end) },
    { title: "Lag", class: "plot", cell: (line) => [spark(`group ${known.group} ${line.topic} ${line.partition} lag`, `Lag of ${line.topic}-${line.partition}`, count, standing(line) ? "warn" : "", LAG_FLOOR), h("span", { class: "reading" }, count(line.lag))] },
    { title: "State", cell: (line) => (standing(line) ? badge("bad", "stands") : line.lag > 0 ? badge("", "behind") : line.lag === 0 ? badge("ok", "caught up") : badge("", "not committed")) },
    { title: "Member", class: "mono", cell: (line) => (line.member ? clients.get(line.member)?.client_id ?? line.member : "–") },
  ];
  const memberColumns = [
    { title: "Client", cell: (member) => h("strong", null, member.client_id || "–") },
    { title: "Host", class: "mono", cell: (member) => member.host },
    { title: "Holds", cell: (member) => member.partitions.map((held) => `${held.topic}-${held.partition}`).join(", ") || "nothing" },
    { title: "Member", class: "mono faint", cell: (member) => member.instance ?? member.member },
  ];
  const trend = recent(`group ${known.group} lag`);
  const change = trend.length > 1 ? trend[trend.length - 1].value - trend[0].value : 0;
  return [
    h("dl", { class: "figures" },
      h("div", { class: "figure" }, h("dt", null, "Lag"), h("dd", null, h("span", { class: "value" }, compact(known.lag)), spark(`group ${known.group} lag`, "Lag", count, "", LAG_FLOOR))),
      h("div", { class: "figure" }, h("dt", null, "In two minutes"), h("dd", null, h("span", { class: "value" }, `${change > 0 ? "+" : ""}${count(change)}`))),
      h("div", { class: "figure" }, h("dt", null, "Members"), h("dd", null, h("span", { class: "value" }, count(known.members.length)))),
      h("div", { class: "figure" }, h("dt", null, "Coordinator"), h("dd", null, h("span", { class: "value" }, `node ${known.coordinator}`)))),
    panel("Partitions", { aside: h("span", { class: "muted" }, plural(known.partitions.length, "partition")) },
      known.partitions.length ? table("Partitions of the group", columns, known.partitions, (line) => `${line.topic}-${line.partition}`) : empty("It has committed nothing and holds nothing.")),
    panel("Members", { aside: known.assignor && h("span", { class: "muted" }, known.assignor) },
      known.members.length ? table("Members", memberColumns, known.members, (member) => member.member) : empty("Nobody is in it now.")),
  ];
}
