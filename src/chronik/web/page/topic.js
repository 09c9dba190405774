// One topic: its partitions live, its messages, its traces with stall windows, its settings, and the doctor.

import { h } from "./dom.js";
import { doctor } from "./doctor.js";
import { compact, count, duration, plural, rate } from "./format.js";
import { messages } from "./messages.js";
import { isStalled, LAG_FLOOR } from "./overview.js";
import { badge, empty, error, nodes, panel, table } from "./parts.js";
import { spark } from "./spark.js";
import { sampledWindows } from "./stalls.js";
import { stallPanel, traces } from "./traces.js";

const TABS = { partitions: "Partitions", messages: "Messages", traces: "Traces", settings: "Settings" };
const OLD_MS = 3000;

const doctors = new Map(); // What the doctor said stays while one looks at the other tabs.

export function topic(name, tab, draw) {
  const here = `#/topics/${encodeURIComponent(name)}`;
  const shown = TABS[tab] ? tab : "partitions";
  if (!doctors.has(name)) doctors.set(name, doctor(name, draw));
  const browser = shown === "messages" ? messages(name, draw) : null;
  const draws = {
    partitions: (state) => [figures(state.topic), partitionPanel(state.topic), groupsOf(name, state.groups), sampledWindows(name).length ? stallPanel(name, []) : null],
    messages: (state) => browser.draw(state.topic),
    traces: (state) => traces(name, state),
    settings: (state) => settingsPanel(state.topic),
  };
  return {
    title: name,
    query: `topic=${encodeURIComponent(name)}&groups=1${shown === "traces" ? "&traces=1" : ""}`,
    heard: (event, data) => browser?.heard(event, data),
    draw: (state) => [
      h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Cluster")),
      h("div", { class: "title" },
        h("h1", null, name),
        state.topic?.partitions && health(state.topic),
        state.topic?.configs?.["chronik.trace"] === "true" && badge("accent", "traced"),
        doctors.get(name).button(state)),
      h("nav", { class: "tabs", "aria-label": "Topic" },
        Object.entries(TABS).map(([key, text]) => h("a", { href: key === "partitions" ? here : `${here}/${key}`, "aria-current": key === shown ? "page" : null }, text))),
      doctors.get(name).draw(),
      state.topic?.error ? error(state.topic.error) : state.topic ? draws[shown](state) : empty("Asking its leaders."),
    ],
  };
}

export function partitionHealth(line) {
  if (line.leader < 0) return badge("bad", "no leader");
  if (isStalled(line)) return badge("bad", `stalled ${duration(line.stands_ms)}`, `The watermark stands at ${line.high_watermark} while the log ends at ${line.log_end_offset}`);
  if (line.age_ms === null || line.age_ms > OLD_MS) return badge("warn", line.age_ms === null ? "leader silent" : `told ${duration(line.age_ms)} ago`);
  if (line.node !== line.leader) return badge("warn", `as node ${line.node} knows`, "The leader does not answer: these are the offsets of this node's own copy");
  if (line.isr.length < line.replicas.length) return badge("warn", "under-replicated");
  return badge("ok", "ok");
}

function health(known) {
  const stalled = known.partitions.filter(isStalled);
  if (known.leaderless) return badge("bad", `${plural(known.leaderless, "partition")} without a leader`);
  if (stalled.length) return badge("bad", `partition ${stalled.map((line) => line.partition).slice(0, 5).join(", ")} stalled`);
  if (known.under_replicated) return badge("warn", `${count(known.under_replicated)} under-replicated`);
  return badge("ok", "ok");
}

const sum = (lines, key) => (lines.every((line) => line[key] === null) ? null : lines.reduce((total, line) => total + (line[key] ?? 0), 0));

function figures(known) {
  const lines = known.partitions;
  const records = sum(lines, "log_end_offset") === null ? null : sum(lines, "log_end_offset") - sum(lines, "log_start_offset");
  const lag = sum(lines, "lag");
  const figure = (title, value, tone) => h("div", { class: `figure ${tone ?? ""}` }, h("dt", null, title), h("dd", null, h("span", { class: "value" }, value)));
  return h("dl", { class: "figures" },
    figure("Records", count(records)),
    figure("Rate", rate(sum(lines, "rate"))),
    figure("Not yet committed", compact(lag), lines.some(isStalled) ? "bad" : ""),
    figure("Partitions", count(lines.length)),
    figure("Copies", count(known.replication_factor)));
}

function partitionPanel(known) {
  const series = (line, what) => `partition ${known.name} ${line.partition} ${what}`;
  const columns = [
    { title: "Partition", cell: (line) => h("strong", null, line.partition) },
    { title: "State", class: "status", cell: partitionHealth },
    { title: "Leader", number: true, cell: (line) => (line.leader < 0 ? h("span", { class: "bad" }, "none") : `node ${line.leader}`) },
    { title: "In sync", cell: (line) => nodes(line.replicas, line.isr, line.leader) },
    { title: "Start", number: true, cell: (line) => count(line.log_start_offset) },
    { title: "Watermark", number: true, cell: (line) => count(line.high_watermark) },
    { title: "Log end", number: true, cell: (line) => count(line.log_end_offset) },
    { title: "Lag", class: "plot", cell: (line) => [spark(series(line, "lag"), `Watermark lag of partition ${line.partition}`, count, isStalled(line) ? "warn" : "", LAG_FLOOR), h("span", { class: `reading ${isStalled(line) ? "warn" : ""}` }, count(line.lag))] },
    { title: "Rate", class: "plot", cell: (line) => [spark(series(line, "rate"), `Rate of partition ${line.partition}`, rate), h("span", { class: "reading" }, rate(line.rate))] },
  ];
  return panel("Partitions", null, table(`Partitions of ${known.name}`, columns, known.partitions, (line) => `partition-${line.partition}`));
}

function groupsOf(name, groups) {
  const lines = (groups?.groups ?? []).filter((line) => line.topics.includes(name));
  if (!lines.length) return null;
  const columns = [
    { title: "Group", class: "name", cell: (line) => h("a", { href: `#/groups/${encodeURIComponent(line.group)}` }, line.group) },
    { title: "State", class: "status", cell: (line) => badge(line.state === "Stable" ? "ok" : line.state === "Empty" ? "" : "warn", line.state) },
    { title: "Members", number: true, cell: (line) => count(line.member_count) },
    { title: "Lag", class: "plot", cell: (line) => [spark(`group ${line.group} lag`, `Lag of ${line.group}`, count, "", LAG_FLOOR), h("span", { class: "reading" }, count(line.lag))] },
  ];
  return panel("Groups that read it", null, table("Groups that read the topic", columns, lines, (line) => `group-${line.group}`));
}

function settingsPanel(known) {
  const entries = Object.entries(known.configs);
  const columns = [
    { title: "Setting", class: "mono", cell: ([key]) => key },
    { title: "Value", class: "mono", cell: ([, value]) => value },
  ];
  return panel("Settings of its own", { aside: h("span", { class: "muted mono" }, known.id) },
    entries.length ? table("Settings", columns, entries, ([key]) => key) : empty("Everything is as the nodes' defaults say. ", h("code", null, `chronik topic alter ${known.name} --config k=v`), " changes that."));
}
