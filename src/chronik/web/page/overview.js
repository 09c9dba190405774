// The cluster: its health in one sentence, its nodes, its topics and its groups.

import { h } from "./dom.js";
import { compact, count, duration, plural, rate } from "./format.js";
import { badge, empty, error, panel, table } from "./parts.js";
import { spark } from "./spark.js";

const STALLED_MS = 1000;
export const LAG_FLOOR = 20;
const LAG_LARGE = 100;
let withInternal = false;

export const isStalled = (line) => (line.stands_ms ?? 0) >= STALLED_MS;

export function overview() {
  return {
    title: "Cluster",
    query: "topics=1&groups=1",
    draw: (state) => [
      h("h1", { class: "hidden" }, "Cluster"),
      health(state),
      figures(state),
      nodePanel(state.cluster),
      damagePanel(state.cluster),
      topicPanel(state),
      groupPanel(state.groups),
    ],
  };
}

export function verdict({ cluster, topics }) {
  if (!cluster?.nodes) return { tone: "", words: "Waiting for the cluster's metadata", detail: "" };
  // Metadata of a node that is cut off looks as well as it did last.
  if (cluster.is_ready === false) return { tone: "bad", words: `Node ${cluster.node_id} is cut off, or not started yet`, detail: "What follows is the last that it knew. Too few nodes may be running for a controller: look at the others" };
  const alive = cluster.nodes.filter((node) => node.state === "alive").length;
  const down = cluster.nodes.filter((node) => node.state === "fenced").map((node) => node.id);
  const stalled = (topics?.topics ?? []).filter(isStalled);
  const named = (partitions, total) => `${partitions.slice(0, 6).join(", ")}${total > 6 ? ` and ${total - 6} more` : ""}`;
  if (cluster.leaderless) return { tone: "bad", words: `${plural(cluster.leaderless, "partition has", "partitions have")} no leader`, detail: named(cluster.leaderless_partitions, cluster.leaderless) };
  if (stalled.length) return { tone: "bad", words: `Watermark stands on ${stalled.map((line) => line.name).slice(0, 4).join(", ")}`, detail: "Records are written, and consumers do not see them yet" };
  if (down.length) return { tone: "bad", words: `Node ${down.join(", ")} ${down.length === 1 ? "is" : "are"} down`, detail: cluster.under_replicated ? `${plural(cluster.under_replicated, "partition")} under-replicated` : "Every partition is in sync without it" };
  if (cluster.controller === null) return { tone: "bad", words: "No controller is known here", detail: "Metadata cannot change until one is elected" };
  if (cluster.under_replicated) return { tone: "warn", words: `${plural(cluster.under_replicated, "partition is", "partitions are")} under-replicated`, detail: named(cluster.under_replicated_partitions, cluster.under_replicated) };
  return { tone: "ok", words: "Healthy", detail: `${alive} of ${cluster.nodes.length} nodes alive, every partition in sync` };
}

function health(state) {
  const { tone, words, detail } = verdict(state);
  return h("div", { class: `health ${tone}`, role: "status", id: "health" }, h("span", { class: `dot ${tone}` }), h("strong", null, words), h("span", { class: "muted" }, detail));
}

function figures({ cluster, topics }) {
  const lines = topics?.topics ?? [];
  const total = lines.reduce((sum, line) => sum + (line.rate ?? 0), 0);
  const lag = lines.reduce((most, line) => Math.max(most, line.lag ?? 0), 0);
  const figure = (title, value, plot, tone) => h("div", { class: `figure ${tone ?? ""}` }, h("dt", null, title), h("dd", null, h("span", { class: "value" }, value), plot));
  return h("dl", { class: "figures" },
    figure("Records in", rate(total), spark("rate", "Records in", rate)),
    figure("Highest watermark lag", compact(lag), spark("lag", "Watermark lag", count, lag > LAG_LARGE ? "warn" : "", LAG_FLOOR), lag > LAG_LARGE ? "warn" : ""),
    figure("Topics", count(cluster?.topics)),
    figure("Partitions", count(cluster?.partitions)),
    figure("Under-replicated", count(cluster?.under_replicated), null, cluster?.under_replicated ? "warn" : ""),
    figure("Without a leader", count(cluster?.leaderless), null, cluster?.leaderless ? "bad" : ""));
}

const STATES = { alive: ["ok", "alive"], fenced: ["bad", "down"], stopping: ["warn", "stopping"] };

function nodePanel(cluster) {
  if (!cluster?.nodes) return panel("Nodes", null, cluster?.error ? error(cluster.error) : empty("Nothing is known yet."));
  const columns = [
    { title: "Node", cell: (node) => [h("strong", null, node.id), node.id === cluster.controller && badge("accent", "controller"), node.id === cluster.node_id && badge("", "this page")] },
    { title: "State", class: "status", cell: (node) => h("span", { class: "state" }, h("span", { class: `dot ${STATES[node.state]?.[0] ?? ""}` }), STATES[node.state]?.[1] ?? node.state) },
    { title: "Kafka", class: "mono", cell: (node) => node.kafka },
    { title: "Page", class: "mono", cell: (node) => (node.http && node.id !== cluster.node_id ? h("a", { href: `http://${node.http}/` }, node.http) : node.http || "–") },
    { title: "Leads", number: true, cell: (node) => count(node.leaders) },
    { title: "Replicas", number: true, cell: (node) => count(node.replicas) },
    { title: "In sync", number: true, cell: (node) => h("span", { class: node.in_sync < node.replicas ? "warn" : "" }, count(node.in_sync)) },
  ];
  return panel("Nodes", { aside: h("span", { class: "muted" }, `cluster ${cluster.cluster_id}`) }, table("Nodes of the cluster", columns, cluster.nodes, (node) => `node-${node.id}`));
}

const DAMAGE = { waiting: ["bad", "not healed"], fetching: ["warn", "fetches it again"], healed: ["ok", "healed"] };

function damagePanel(cluster) {
  if (!cluster?.damages?.length) return null;
  const columns = [
    { title: "Replica", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.topic)}` }, `${line.topic}-${line.partition}`) },
    { title: "State", class: "status", cell: (line) => badge(DAMAGE[line.state]?.[0] ?? "", DAMAGE[line.state]?.[1] ?? line.state, line.waits_for) },
    { title: "Found", cell: (line) => `${new Date(line.found_ms).toLocaleString()}, by ${line.how}` },
    { title: "Offset", number: true, cell: (line) => count(line.offset) },
    { title: "What", cell: (line) => [line.reason, line.waits_for && h("span", { class: "muted" }, `; ${line.waits_for}`)] },
  ];
  return panel(`Damage found on node ${cluster.node_id}`, null, table("Damage that was found in logs of this node", columns, cluster.damages, (line) => `damage-${line.topic}-${line.partition}-${line.found_ms}-${line.offset}`));
}

export function topicHealth(line) {
  if (line.leaderless) return badge("bad", "no leader");
  if (isStalled(line)) return badge("bad", `stalled ${duration(line.stands_ms)}`);
  if (line.under_replicated) return badge("warn", "under-replicated");
  return badge("ok", "ok");
}

function topicPanel({ topics }) {
  const toggle = h("label", { class: "check" }, h("input", { type: "checkbox", "data-static": true, onchange: (event) => { withInternal = event.target.checked; } }), "internal ones");
  if (!topics) return panel("Topics", { aside: toggle }, empty("Nothing is known yet."));
  if (topics.error) return panel("Topics", { aside: toggle }, error(topics.error));
  const lines = topics.topics.filter((line) => withInternal || !(line.internal || line.name.startsWith("__")));
  const columns = [
    { title: "Topic", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.name)}` }, line.name) },
    { title: "Health", class: "status", cell: topicHealth },
    { title: "Partitions", number: true, cell: (line) => count(line.partitions) },
    { title: "Copies", number: true, cell: (line) => count(line.replication_factor) },
    { title: "Records", number: true, cell: (line) => count(line.records) },
    { title: "Lag", number: true, cell: (line) => h("span", { class: line.lag > LAG_LARGE || isStalled(line) ? "warn" : "" }, count(line.lag)) },
    { title: "Rate", class: "plot", cell: (line) => [spark(`topic ${line.name} rate`, `Rate of ${line.name}`, rate), h("span", { class: "reading" }, rate(line.rate))] },
  ];
  const body = lines.length ? table("Topics", columns, lines, (line) => `topic-${line.name}`) : empty("There is no topic yet. ", h("code", null, "chronik topic create NAME"), " makes one.");
  return panel("Topics", { aside: toggle }, body);
}

export function groupPanel(groups) {
  if (!groups) return panel("Groups", null, empty("Nothing is known yet."));
  if (groups.error) return panel("Groups", null, error(groups.error));
  const columns = [
    { title: "Group", class: "name", cell: (line) => h("a", { href: `#/groups/${encodeURIComponent(line.group)}` }, line.group) },
    { title: "State", class: "status", cell: (line) => badge(line.state === "Stable" ? "ok" : line.state === "Empty" ? "" : "warn", line.state) },
    { title: "Members", number: true, cell: (line) => count(line.member_count) },
    { title: "Topics", class: "name", cell: (line) => line.topics.join(", ") || "–" },
    { title: "Coordinator", number: true, cell: (line) => `node ${line.coordinator}` },
    { title: "Lag", class: "plot", cell: (line) => [spark(`group ${line.group} lag`, `Lag of ${line.group}`, count, "", LAG_FLOOR), h("span", { class: "reading" }, count(line.lag))] },
  ];
  const silent = groups.silent_nodes?.length ? h("p", { class: "notice warn" }, `Node ${groups.silent_nodes.join(", ")} did not answer: its groups are missing here.`) : null;
  const body = groups.groups.length ? table("Consumer groups", columns, groups.groups, (line) => `group-${line.group}`) : empty("No consumer group has committed or joined yet.");
  return panel("Groups", { aside: groups.total > groups.groups.length && h("span", { class: "muted" }, `${groups.groups.length} of ${groups.total}`) }, silent, body);
}
