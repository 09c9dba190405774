// The consumer groups, and one group with its members and the lag of each partition.

import { h } from "./dom.js";
import { compact, count, duration, plural } from "./format.js";
import { groupPanel, LAG_FLOOR } from "./overview.js";
import { badge, empty, error, figure, groupState, panel, table } from "./parts.js";
import { recent, spark } from "./spark.js";

const STUCK_MS = 10000;

export function groups() {
  return { title: "Groups", query: "groups=1", draw: (state) => [h("h1", null, "Groups"), groupPanel(state.groups)] };
}

export function group(name) {
  const commits = new Map(); // By partition: the committed offset, and when it was first seen.
  return {
    title: name,
    query: `group=${encodeURIComponent(name)}`,
    heard(event, data) {
      if (event !== "group") return;
      for (const line of data.partitions ?? []) {
        const key = `${line.topic} ${line.partition}`;
        if (commits.get(key)?.committed !== line.committed) commits.set(key, { committed: line.committed, at: Date.now() });
      }
    },
    draw: ({ group: known }) => [
      h("p", { class: "crumbs" }, h("a", { href: "#/groups" }, "Groups")),
      h("div", { class: "title" }, h("h1", null, name), known?.state && groupState(known)),
      known?.error ? error(known.error) : known ? body(known, commits) : empty("Waiting for its coordinator."),
    ],
  };
}

const names = (partitions) => partitions.map((held) => `${held.topic}-${held.partition}`).sort().join(", ") || "nothing";

// A member that has not its target yet still owes a revocation, or waits for one of another member.
const target = (member) => (names(member.target) === names(member.partitions) ? "reached" : badge("warn", names(member.target)));

function body(known, commits) {
  const isShare = known.group_type === "share";
  const clients = new Map(known.members.map((member) => [member.member, member]));
  const isStuck = (line) => line.lag > 0 && Date.now() - (commits.get(`${line.topic} ${line.partition}`)?.at ?? Date.now()) > STUCK_MS;
  const columns = [
    { title: "Partition", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.topic)}` }, `${line.topic}-${line.partition}`) },
    { title: isShare ? "Start" : "Committed", number: true, cell: (line) => count(line.committed) },
    { title: "End", number: true, cell: (line) => count(line.end) },
    { title: "Lag", class: "plot", cell: (line) => [spark(`group ${known.group} ${line.topic} ${line.partition} lag`, `Lag of ${line.topic}-${line.partition}`, count, isStuck(line) ? "warn" : "", LAG_FLOOR), h("span", { class: "reading" }, count(line.lag))] },
    ...(isShare ? [
      { title: "In flight", number: true, cell: (line) => count(line.share?.in_flight) },
      { title: "Delivered", number: true, cell: (line) => count(line.share?.delivered) },
      { title: "Accepted", number: true, cell: (line) => count(line.share?.accepted) },
      { title: "Rejected", number: true, cell: (line) => count(line.share?.rejected) },
      { title: "Oldest lock", number: true, cell: (line) => (line.share ? duration(line.share.oldest_lock_s * 1000) : "–") },
    ] : []),
    { title: "State", cell: (line) => (isStuck(line) ? badge("bad", "stuck") : line.lag > 0 ? badge("", "behind") : line.lag === 0 ? badge("ok", "caught up") : badge("", "not committed")) },
    { title: "Member", class: "mono", cell: (line) => (line.member ? clients.get(line.member)?.client_id ?? line.member : "–") },
  ];
  const memberColumns = [
    { title: "Client", cell: (member) => h("strong", null, member.client_id || "–") },
    { title: "Host", class: "mono", cell: (member) => member.host },
    ...(known.epoch === null ? [] : [{ title: "Epoch", number: true, cell: (member) => count(member.epoch) }]),
    { title: "Assigned", cell: (member) => names(member.partitions) },
    ...(known.members.some((member) => member.target) ? [{ title: "Target", cell: (member) => (member.target ? target(member) : "–") }] : []),
    { title: "Member", class: "mono faint", cell: (member) => member.instance ?? member.member },
  ];
  const trend = recent(`group ${known.group} lag`);
  const change = trend.length > 1 ? trend[trend.length - 1].value - trend[0].value : 0;
  return [
    h("dl", { class: "figures" },
      figure("Lag", compact(known.lag), "", spark(`group ${known.group} lag`, "Lag", count, "", LAG_FLOOR)),
      figure("Change in two minutes", `${change > 0 ? "+" : ""}${count(change)}`),
      figure("Members", count(known.members.length)),
      figure("Type", known.group_type),
      known.epoch !== null && figure("Epoch", known.epoch === known.assignment_epoch ? count(known.epoch) : `${count(known.epoch)}, target of ${count(known.assignment_epoch)}`),
      figure("Coordinator", `node ${known.coordinator}`)),
    panel("Partitions", { aside: h("span", { class: "muted" }, plural(known.partitions.length, "partition")) },
      known.partitions.length ? table("Partitions of the group", columns, known.partitions, (line) => `${line.topic}-${line.partition}`) : empty("The group has no committed offsets and no assigned partitions.")),
    panel("Members", { aside: known.assignor && h("span", { class: "muted" }, known.assignor) },
      known.members.length ? table("Members", memberColumns, known.members, (member) => member.member) : empty("The group has no members.")),
  ];
}
