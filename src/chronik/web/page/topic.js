// One topic: its partitions, messages, traces with stall windows and settings, and the doctor.

import { h } from "./dom.js";
import { doctor } from "./doctor.js";
import { compact, count, duration, plural, rate } from "./format.js";
import { messages } from "./messages.js";
import { GROUP_COLUMNS, isStalled, LAG_FLOOR, transactionPanel } from "./overview.js";
import { badge, empty, error, figure, nodes, panel, table } from "./parts.js";
import { spark } from "./spark.js";
import { sampledWindows } from "./stalls.js";
import { stallPanel, traces } from "./traces.js";

const TABS = { partitions: "Partitions", messages: "Messages", traces: "Traces", settings: "Settings" };
const OLD_MS = 3000;
const SHOWN_MAX = 200;

const doctors = new Map(); // A diagnosis stays while other tabs are shown.

export function topic(name, tab, draw) {
  const here = `#/topics/${encodeURIComponent(name)}`;
  const shown = TABS[tab] ? tab : "partitions";
  if (!doctors.has(name)) doctors.set(name, doctor(name, draw));
  const browser = shown === "messages" ? messages(name, draw) : null;
  const draws = {
    partitions: (state) => [figures(state.topic), partitionPanel(state.topic), groupsOf(name, state.groups), transactionPanel(state.transactions, name), sampledWindows(name).length ? stallPanel(name, []) : null],
    messages: (state) => browser.draw(state.topic),
    traces: (state) => traces(name, state),
    settings: (state) => settingsPanel(state.topic),
  };
  return {
    title: name,
    query: `topic=${encodeURIComponent(name)}&groups=1&transactions=1${shown === "traces" ? "&traces=1" : ""}`,
    heard: (event, data) => browser?.heard(event, data),
    draw: (state) => [
      h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Cluster")),
      h("div", { class: "title" },
        h("h1", null, name),
        state.topic?.partitions && (state.cluster?.is_ready === false ? badge("bad", "last known state") : health(state.topic)),
        state.topic?.configs?.["chronik.trace"] === "true" && badge("accent", "traced"),
        doctors.get(name).button(state)),
      h("nav", { class: "tabs", "aria-label": "Topic" },
        Object.entries(TABS).map(([key, text]) => h("a", { href: key === "partitions" ? here : `${here}/${key}`, "aria-current": key === shown ? "page" : null }, text))),
      doctors.get(name).draw(),
      state.topic?.error ? error(state.topic.error) : state.topic ? draws[shown](state) : empty("Waiting for its leaders."),
    ],
  };
}

function partitionHealth(line) {
  if (line.leader < 0) return badge("bad", "no leader");
  if (isStalled(line)) return badge("bad", `stalled ${duration(line.stuck_ms)}`, `The watermark is stuck at ${line.high_watermark}, and the log ends at ${line.log_end_offset}`);
  if (line.age_ms === null || line.age_ms > OLD_MS) return badge("warn", line.age_ms === null ? "leader silent" : `reported ${duration(line.age_ms)} ago`);
  if (line.node !== line.leader) return badge("warn", `from node ${line.node}`, "The leader does not answer: these are the offsets of this node's own replica");
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
  return h("dl", { class: "figures" },
    figure("Records", count(records)),
    figure("Rate", rate(sum(lines, "rate"))),
    figure("Watermark lag", compact(lag), lines.some(isStalled) ? "bad" : ""),
    figure("Partitions", count(lines.length)),
    figure("Replicas", count(known.replication_factor)));
}

function partitionPanel(known) {
  const series = (line, what) => `partition ${known.name} ${line.partition} ${what}`;
  const columns = [
    { title: "Partition", cell: (line) => h("strong", null, line.partition) },
    { title: "State", class: "status", cell: partitionHealth },
    { title: "Leader", number: true, cell: (line) => (line.leader < 0 ? h("span", { class: "bad" }, "none") : `node ${line.leader}`) },
    { title: "In sync", cell: (line) => nodes(line.replicas, line.isr, line.leader) },
    { title: "Start", number: true, cell: (line) => count(line.log_start_offset) },
    { title: "Last stable", number: true, cell: (line) => h("span", { class: line.last_stable_offset < line.high_watermark ? "warn" : "", title: "read_committed consumers see records below this offset" }, count(line.last_stable_offset)) },
    { title: "Watermark", number: true, cell: (line) => count(line.high_watermark) },
    { title: "Log end", number: true, cell: (line) => count(line.log_end_offset) },
    { title: "Lag", class: "plot", cell: (line) => [spark(series(line, "lag"), `Watermark lag of partition ${line.partition}`, count, isStalled(line) ? "warn" : "", LAG_FLOOR), h("span", { class: `reading ${isStalled(line) ? "warn" : ""}` }, count(line.lag))] },
    { title: "Rate", class: "plot", cell: (line) => [spark(series(line, "rate"), `Rate of partition ${line.partition}`, rate), h("span", { class: "reading" }, rate(line.rate))] },
  ];
  const isWell = (line) => line.leader >= 0 && !isStalled(line) && line.isr.length === line.replicas.length;
  const all = known.partitions;
  const shown = all.length > SHOWN_MAX ? [...all].sort((one, other) => isWell(one) - isWell(other)).slice(0, SHOWN_MAX) : all;
  const aside = shown.length < all.length && h("span", { class: "muted" }, `${SHOWN_MAX} of ${count(all.length)}, those with problems first`);
  return panel("Partitions", { aside }, table(`Partitions of ${known.name}`, columns, shown, (line) => `partition-${line.partition}`));
}

function groupsOf(name, groups) {
  const lines = (groups?.groups ?? []).filter((line) => line.topics.includes(name));
  if (!lines.length) return null;
  const columns = GROUP_COLUMNS.filter(({ title }) => title !== "Topics" && title !== "Coordinator");
  return panel("Groups", null, table("Groups that consume the topic", columns, lines, (line) => `group-${line.group}`));
}

function settingsPanel(known) {
  if (known.configs === null) return panel("Topic settings", null, empty(`You may not see the settings: ask for DESCRIBE_CONFIGS on topic ${known.name}.`));
  const entries = Object.entries(known.configs);
  const columns = [
    { title: "Setting", class: "mono", cell: ([key]) => key },
    { title: "Value", class: "mono", cell: ([, value]) => value },
  ];
  return panel("Topic settings", { aside: h("span", { class: "muted mono" }, known.id) },
    entries.length ? table("Settings", columns, entries, ([key]) => key) : empty("All settings have their default values. Change one with ", h("code", null, `chronik topic alter ${known.name} --config k=v`)));
}
