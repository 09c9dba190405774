// The traces of a topic: a timeline of each partition, stall windows, and the events.

import { h } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { badge, empty, figure, panel, table } from "./parts.js";
import { windows } from "./stalls.js";

const SPAN_MS = 60000;
const WIDTH = 1000;
const ROW = 30;
const ROWS_MAX = 32;
const LISTED_MAX = matchMedia("(max-width: 760px)").matches ? 40 : 150;

export function traces(name, state) {
  const events = state.traces.events.filter((event) => event.topic === name);
  const isTraced = state.topic?.configs?.["chronik.trace"] === "true" || state.traces.traced.includes(name);
  if (!isTraced && !events.length) {
    return panel("Traces", null, empty("Tracing is off for this topic. Enable it with ", h("code", null, `chronik trace on ${name}`), ". Stalls are sampled without it, too."), stallPanel(name, []));
  }
  return [
    state.traces.silent.length > 0 && h("p", { class: "notice warn" }, `Node ${state.traces.silent.join(", ")} did not answer, so its traces are missing.`),
    figures(events),
    panel("Last minute", { aside: legend() }, timeline(name, events, state.topic)),
    stallPanel(name, events),
    panel("Events", { aside: h("span", { class: "muted" }, `newest ${count(Math.min(LISTED_MAX, events.length))} of ${count(events.length)}`) },
      events.length ? table("Events", COLUMNS, events.slice(-LISTED_MAX).reverse(), (event) => `${event.node}-${event.n}`) : empty("There are no events yet: no client has produced or consumed.")),
  ];
}

export function stallPanel(name, events) {
  const stalls = windows(name, events).slice(0, 50);
  const columns = [
    { title: "Partition", cell: (one) => h("strong", null, one.partition) },
    { title: "Since", class: "mono", cell: (one) => clock(one.from) },
    { title: "For", number: true, cell: (one) => (one.to === null ? badge("bad", `${duration(Date.now() - one.from)}, still`) : duration(one.to - one.from)) },
    { title: "What", class: "wide", cell: (one) => one.what },
  ];
  return panel("Stall windows", null, stalls.length ? table("Stall windows", columns, stalls, (one) => `${one.partition}-${Math.round(one.from)}-${one.what.slice(0, 12)}`) : empty("There were no stalls."));
}

function figures(events) {
  const fetched = events.filter((event) => event.kind === "fetch-served");
  const waits = new Set(events.filter((event) => event.kind === "no-data").map((event) => `${event.node} ${event.fetch}`));
  const started = new Set(events.filter((event) => event.kind === "fetch-started").map((event) => `${event.node} ${event.fetch}`));
  // Only fetches whose start is known and that did not wait for data: waiting is normal.
  const direct = fetched.filter((event) => started.has(`${event.node} ${event.fetch}`) && !waits.has(`${event.node} ${event.fetch}`)).map((event) => event.elapsed_ms);
  const acked = events.filter((event) => event.kind === "produce-acknowledged").map((event) => event.elapsed_ms).sort((one, other) => one - other);
  const rejected = events.filter((event) => event.kind === "produce-rejected" || (event.kind === "fetch-served" && event.error)).length;
  const slowest = direct.length ? Math.max(...direct) : null;
  const ms = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`);
  return h("dl", { class: "figures" },
    figure("Fetches served", count(fetched.length)),
    figure("Slowest fetch that had data", ms(slowest), slowest > 100 ? "warn" : ""),
    figure("Acknowledged, median", ms(acked[Math.floor(acked.length / 2)])),
    figure("Acknowledged, slowest", ms(acked[acked.length - 1])),
    figure("Rejected", count(rejected), rejected ? "bad" : ""));
}

const LANES = { "produce-appended": ["produce", 4, 10], "watermark-updated": ["watermark", 15, 4], "fetch-served": ["fetch", 20, 7] };

const legend = () => h("span", { class: "legend" }, Object.entries({ produce: "appended", watermark: "watermark rose", fetch: "fetch served", stall: "stall" }).map(([lane, text]) => h("span", { class: `lane ${lane}` }, text)));

function timeline(name, events, known) {
  const now = Date.now();
  const partitions = (known?.partitions ?? []).map((line) => line.partition).slice(0, ROWS_MAX);
  const x = (at) => Math.max(0, WIDTH - ((now - at) / SPAN_MS) * WIDTH);
  const recent = events.filter((event) => event.time_ms > now - SPAN_MS && LANES[event.kind]);
  const stalls = windows(name, events).filter((one) => (one.to ?? now) > now - SPAN_MS);
  return h("div", { class: "timeline" }, partitions.map((partition) => {
    const paths = {};
    for (const event of recent) {
      if (event.partition !== partition || (event.kind === "watermark-updated" && event.why === "leader")) continue;
      const [lane, top, height] = LANES[event.kind];
      paths[lane] = `${paths[lane] ?? ""}M${x(event.time_ms).toFixed(1)} ${top}v${height}`;
    }
    return h("div", { class: "track", "data-key": `track-${partition}` }, h("span", { class: "muted" }, partition),
      h("svg", { viewBox: `0 0 ${WIDTH} ${ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": `Partition ${partition}, last minute: ${stalls.filter((one) => one.partition === partition).length} stalls` },
        stalls.filter((one) => one.partition === partition).map((one) => h("rect", { class: "stall", x: x(one.from).toFixed(1), y: 1, height: ROW - 2, width: Math.max(2, x(one.to ?? now) - x(one.from)).toFixed(1) }, h("title", null, one.what))),
        Object.entries(paths).map(([lane, d]) => h("path", { class: lane, d }))));
  }), h("p", { class: "axis muted" }, h("span", null, "60 s ago"), h("span", null, "now")));
}

const LEFT_OUT = new Set(["n", "time_ms", "node", "kind", "topic", "partition"]);
const TONES = { "produce-rejected": "bad", "isr-changed": "warn", "produce-forwarded": "accent" };

const COLUMNS = [
  { title: "Time", class: "mono", cell: (event) => clock(event.time_ms) },
  { title: "Node", number: true, cell: (event) => event.node },
  { title: "Partition", number: true, cell: (event) => event.partition },
  { title: "What", cell: (event) => badge(event.error ? "bad" : TONES[event.kind] ?? "", event.kind.replaceAll("-", " ")) },
  { title: "Details", class: "mono wide", cell: (event) => Object.entries(event).filter(([key, value]) => !LEFT_OUT.has(key) && value !== null).map(([key, value]) => `${key}=${Array.isArray(value) ? value.join(",") : value}`).join(" ") },
];
