// The cluster: its health in one sentence, its nodes, topics and groups.

import { h } from "./dom.js";
import { compact, count, duration, moment, plural, rate } from "./format.js";
import { badge, empty, error, figure, groupState, panel, table } from "./parts.js";
import { spark } from "./spark.js";

const STALLED_MS = 1000;
export const LAG_FLOOR = 20;
const LAG_LARGE = 100;
let withInternal = false;

export const isStalled = (line) => (line.stuck_ms ?? 0) >= STALLED_MS;

export function overview() {
  return {
    title: "Cluster",
    query: "topics=1&groups=1&transactions=1&pipelines=1&clients=1",
    draw: (state) => [
      h("h1", { class: "hidden" }, "Cluster"),
      health(state),
      figures(state),
      nodePanel(state.cluster),
      damagePanel(state.cluster),
      topicPanel(state),
      groupPanel(state.groups),
      ...pipelinePanels(state.pipelines),
      transactionPanel(state.transactions),
      clientPanel(state.clients),
    ],
  };
}

function verdict({ cluster, topics }) {
  if (!cluster?.nodes) return { tone: "", words: "Waiting for the cluster's metadata", detail: "" };
  // The metadata of a disconnected node is outdated, and may look healthy.
  if (cluster.is_ready === false) return { tone: "bad", words: `Node ${cluster.node_id} is disconnected, or still starting`, detail: "It shows the last state that it received. Without a majority of nodes there is no controller: check the other nodes" };
  const alive = cluster.nodes.filter((node) => node.state === "alive").length;
  const down = cluster.nodes.filter((node) => node.state === "fenced").map((node) => node.id);
  const stalled = (topics?.topics ?? []).filter(isStalled);
  const named = (partitions, total) => `${partitions.slice(0, 6).join(", ")}${total > 6 ? ` and ${total - 6} more` : ""}`;
  if (cluster.leaderless) return { tone: "bad", words: `${plural(cluster.leaderless, "partition has", "partitions have")} no leader`, detail: named(cluster.leaderless_partitions, cluster.leaderless) };
  if (stalled.length) return { tone: "bad", words: `Watermark stuck on ${stalled.map((line) => line.name).slice(0, 4).join(", ")}`, detail: "Records are written, but consumers cannot see them yet" };
  if (down.length) return { tone: "bad", words: `Node ${down.join(", ")} ${down.length === 1 ? "is" : "are"} down`, detail: cluster.under_replicated ? `${plural(cluster.under_replicated, "partition")} under-replicated` : "No partition is affected" };
  if (cluster.controller === null) return { tone: "bad", words: "This node knows no controller", detail: "Metadata cannot change until one is elected" };
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
  return h("dl", { class: "figures" },
    figure("Records in", rate(total), "", spark("rate", "Records in", rate)),
    figure("Highest watermark lag", compact(lag), lag > LAG_LARGE ? "warn" : "", spark("lag", "Watermark lag", count, lag > LAG_LARGE ? "warn" : "", LAG_FLOOR)),
    figure("Topics", count(cluster?.topics)),
    figure("Partitions", count(cluster?.partitions)),
    figure("Under-replicated", count(cluster?.under_replicated), cluster?.under_replicated ? "warn" : ""),
    figure("Without a leader", count(cluster?.leaderless), cluster?.leaderless ? "bad" : ""));
}

const STATES = { alive: ["ok", "alive"], fenced: ["bad", "down"], stopping: ["warn", "stopping"] };

function nodePanel(cluster) {
  if (!cluster?.nodes) return panel("Nodes", null, cluster?.error ? error(cluster.error) : empty("No data yet."));
  const columns = [
    { title: "Node", cell: (node) => [h("strong", null, node.id), node.id === cluster.controller && badge("accent", "controller"), node.id === cluster.node_id && badge("", "this node")] },
    { title: "State", class: "status", cell: (node) => h("span", { class: "state" }, h("span", { class: `dot ${STATES[node.state]?.[0] ?? ""}` }), STATES[node.state]?.[1] ?? node.state) },
    { title: "Kafka", class: "mono", cell: (node) => node.kafka },
    { title: "Page", class: "mono", cell: (node) => (node.http && node.id !== cluster.node_id ? h("a", { href: `${location.protocol}//${node.http}/` }, node.http) : node.http || "–") },
    { title: "Leads", number: true, cell: (node) => count(node.leaders) },
    { title: "Replicas", number: true, cell: (node) => count(node.replicas) },
    { title: "In sync", number: true, cell: (node) => h("span", { class: node.in_sync < node.replicas ? "warn" : "" }, count(node.in_sync)) },
  ];
  // The nodes of a machine have one rack.
  const lines = [...cluster.nodes].sort((a, b) => (a.rack ?? "").localeCompare(b.rack ?? "") || a.id - b.id);
  const group = ({ rack }) => (rack === null ? null : `Rack ${rack}`);
  return panel("Nodes", { aside: h("span", { class: "muted" }, `cluster ${cluster.cluster_id}`) }, table("Nodes of the cluster", columns, lines, (node) => `node-${node.id}`, group));
}

const DAMAGE = { waiting: ["bad", "not healed"], fetching: ["warn", "fetching again"], healed: ["ok", "healed"] };

function damagePanel(cluster) {
  if (!cluster?.damages?.length) return null;
  const columns = [
    { title: "Replica", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.topic)}` }, `${line.topic}-${line.partition}`) },
    { title: "State", class: "status", cell: (line) => badge(DAMAGE[line.state]?.[0] ?? "", DAMAGE[line.state]?.[1] ?? line.state, line.waits_for) },
    { title: "Found", cell: (line) => `${new Date(line.found_ms).toLocaleString()}, by ${line.how}` },
    { title: "Offset", number: true, cell: (line) => count(line.offset) },
    { title: "Reason", cell: (line) => [line.reason, line.waits_for && h("span", { class: "muted" }, `; ${line.waits_for}`)] },
  ];
  return panel(`Damage found on node ${cluster.node_id}`, null, table("Damage that was found in logs of this node", columns, cluster.damages, (line) => `damage-${line.topic}-${line.partition}-${line.found_ms}-${line.offset}`));
}

function topicHealth(line) {
  if (line.leaderless) return badge("bad", "no leader");
  if (isStalled(line)) return badge("bad", `stalled ${duration(line.stuck_ms)}`);
  if (line.under_replicated) return badge("warn", "under-replicated");
  return badge("ok", "ok");
}

function topicPanel({ topics }) {
  const toggle = h("label", { class: "check" }, h("input", { type: "checkbox", "data-static": true, onchange: (event) => { withInternal = event.target.checked; } }), "internal topics");
  if (!topics) return panel("Topics", { aside: toggle }, empty("No data yet."));
  if (topics.error) return panel("Topics", { aside: toggle }, error(topics.error));
  const lines = topics.topics.filter((line) => withInternal || !(line.internal || line.name.startsWith("__")));
  const columns = [
    { title: "Topic", class: "name", cell: (line) => h("a", { href: `#/topics/${encodeURIComponent(line.name)}` }, line.name) },
    { title: "Health", class: "status", cell: topicHealth },
    { title: "Partitions", number: true, cell: (line) => count(line.partitions) },
    { title: "Replicas", number: true, cell: (line) => count(line.replication_factor) },
    { title: "Records", number: true, cell: (line) => count(line.records) },
    { title: "Watermark lag", number: true, cell: (line) => h("span", { class: line.lag > LAG_LARGE || isStalled(line) ? "warn" : "" }, count(line.lag)) },
    { title: "Rate", class: "plot", cell: (line) => [spark(`topic ${line.name} rate`, `Rate of ${line.name}`, rate), h("span", { class: "reading" }, rate(line.rate))] },
  ];
  const body = lines.length ? table("Topics", columns, lines, (line) => `topic-${line.name}`) : empty("There are no topics yet. Create one with ", h("code", null, "chronik topic create NAME"));
  return panel("Topics", { aside: toggle }, body);
}

export const GROUP_COLUMNS = [
  { title: "Group", class: "name", cell: (line) => h("a", { href: `#/groups/${encodeURIComponent(line.group)}` }, line.group) },
  { title: "State", class: "status", cell: groupState },
  { title: "Members", number: true, cell: (line) => count(line.member_count) },
  { title: "Topics", class: "name", cell: (line) => line.topics.join(", ") || "–" },
  { title: "Coordinator", number: true, cell: (line) => `node ${line.coordinator}` },
  { title: "Lag", class: "plot", cell: (line) => [spark(`group ${line.group} lag`, `Lag of ${line.group}`, count, "", LAG_FLOOR), h("span", { class: "reading" }, count(line.lag))] },
];

export function groupPanel(groups) {
  if (!groups) return panel("Groups", null, empty("No data yet."));
  if (groups.error) return panel("Groups", null, error(groups.error));
  const silent = groups.silent_nodes?.length ? h("p", { class: "notice warn" }, `Node ${groups.silent_nodes.join(", ")} did not answer, so its groups are missing.`) : null;
  const body = groups.groups.length ? table("Consumer groups", GROUP_COLUMNS, groups.groups, (line) => `group-${line.group}`) : empty("There are no consumer groups yet.");
  return panel("Groups", { aside: groups.total > groups.groups.length && h("span", { class: "muted" }, `${groups.groups.length} of ${groups.total}`) }, silent, body);
}

const TRANSACTION_LONG_MS = 10000;

// Open transactions, of one topic if it is named; nothing if there is none.
export function transactionPanel(known, topic) {
  if (!known || known.error) return null;
  const lines = known.transactions.filter((line) => !topic || line.partitions.some((name) => name.replace(/-\d+$/, "") === topic));
  const silent = known.silent_nodes.length ? h("p", { class: "notice warn" }, `Node ${known.silent_nodes.join(", ")} did not answer, so its transactions are missing.`) : null;
  if (!lines.length && !silent) return null;
  const age = (line) => Math.max(0, Date.now() - line.start_ms);
  const columns = [
    { title: "Transactional id", class: "name", cell: (line) => line.transactional_id },
    { title: "State", class: "status", cell: (line) => badge(line.state === "Ongoing" ? "" : "warn", line.state) },
    { title: "Open for", number: true, cell: (line) => h("span", { class: age(line) > TRANSACTION_LONG_MS ? "warn" : "" }, duration(age(line))) },
    { title: "Times out", cell: (line) => moment(line.times_out_ms ?? -1) },
    { title: "Producer", number: true, cell: (line) => `${line.producer_id}, epoch ${line.producer_epoch}` },
    { title: "Coordinator", number: true, cell: (line) => `node ${line.coordinator}` },
    { title: "Partitions", class: "name", cell: (line) => line.partitions.join(", ") || "–" },
  ];
  const shown = known.transactions.length < known.total && h("span", { class: "muted" }, `${known.transactions.length} of ${known.total}`);
  return panel("Open transactions", { aside: shown }, silent, lines.length ? table("Open transactions", columns, lines, (line) => `transaction-${line.transactional_id}`) : null);
}

// What running pipelines report; nothing if there is none, or if the user may not see it.
function pipelinePanels(known) {
  const tones = { running: "ok", complete: "ok", starting: "", stopped: "", pending: "", waiting: "warn", lost: "bad", failed: "bad", incomplete: "bad" };
  const state = (word, title) => badge(tones[word] ?? "", word, title || null);
  const columns = [
    { title: "Job", class: "name", cell: (job) => job.name },
    { title: "From", class: "name", cell: (job) => job.source },
    { title: "To", class: "name", cell: (job) => job.target },
    { title: "State", class: "status", cell: (job) => state(job.state, job.reason) },
    { title: "Rows", number: true, cell: (job) => count(job.rows) },
    { title: "Rows/s", number: true, cell: (job) => (job.rows_per_s === null ? "–" : rate(job.rows_per_s)) },
    { title: "Lag", number: true, cell: (job) => (job.lag === null ? "–" : count(job.lag)) },
    { title: "Dead letters", number: true, cell: (job) => h("span", { class: job.dead_letters ? "warn" : "" }, count(job.dead_letters)) },
    { title: "Last commit", cell: (job) => (job.last_commit_ms === null ? "–" : moment(job.last_commit_ms)) },
    { title: "Restarts", number: true, cell: (job) => count(job.restarts) },
    { title: "Audit", class: "status", cell: (job) => (job.audit ? state(job.audit.verdict, job.audit.reason) : "–") },
  ];
  return (known?.pipelines ?? []).map((line) => {
    const about = h("span", { class: "muted" }, state(line.state), ` ${line.host}, process ${line.pid}`);
    const reasons = line.jobs.filter((job) => job.reason || job.audit?.reason).slice(0, 5);
    const notes = reasons.map((job) => h("p", { class: "notice warn" }, `${job.name}: ${job.reason || job.audit.reason}`));
    const key = `pipeline-${line.name}`;
    return panel(`Pipeline ${line.name}`, { aside: about, key }, notes, line.jobs.length ? table(`Jobs of ${line.name}`, columns, line.jobs, (job) => `${key}-${job.name}`) : empty("It has no jobs yet."));
  });
}

// The clients that push their metrics to this node; nothing if there is none.
function clientPanel(known) {
  const lines = (known?.clients ?? []).filter((line) => line.series);
  if (!lines.length) return null;
  const columns = [
    { title: "Client", class: "name", cell: (line) => line.client_id || "–" },
    { title: "Library", class: "name", cell: (line) => `${line.software_name} ${line.software_version}`.trim() || "–" },
    { title: "Address", cell: (line) => line.address },
    { title: "Interval", number: true, cell: (line) => duration(line.interval_ms) },
    { title: "Pushed", cell: (line) => moment(line.pushed_ms) },
    { title: "Metrics", number: true, cell: (line) => h("a", { href: "/api/client-metrics" }, count(line.series)) },
  ];
  return panel("Metrics of clients", null, table("Clients that push their metrics to this node", columns, lines, (line) => `client-${line.instance_id}`));
}
