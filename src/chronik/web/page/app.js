// The page of one node. Events update `state`, and the current view draws from it.

import { h, show } from "./dom.js";
import { clock } from "./format.js";
import { Live } from "./live.js";
import { keepSession, logOut } from "./session.js";
import { note } from "./spark.js";
import { noteSample } from "./stalls.js";
import { overview } from "./overview.js";
import { topic } from "./topic.js";
import { group, groups } from "./groups.js";
import { schema, schemas } from "./schemas.js";

const TRACES_MAX = 8000;

const state = {
  isConnected: null, // null: not yet
  heardAt: null,
  session: null,
  cluster: null,
  topics: null,
  topic: null,
  groups: null,
  group: null,
  transactions: null,
  pipelines: null,
  clients: null,
  traces: { events: [], traced: [], silent: [] },
};

let view = null;
let isDrawing = false;

// -- routes: #/topics/NAME/messages and similar -------------------------------------------------------------------------

function route() {
  const [path] = location.hash.replace(/^#\/?/, "").split("?");
  return path.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
}

function go() {
  const [kind, name, tab, other] = route();
  if (kind === "topics" && name) view = topic(name, tab ?? "partitions", draw);
  else if (kind === "groups" && name) view = group(name);
  else if (kind === "groups") view = groups();
  else if (kind === "schemas" && name) view = schema(name, Number(tab) || null, Number(other) || null, draw);
  else if (kind === "schemas") view = schemas(draw);
  else view = overview();
  if (state.topic?.name !== name) state.topic = null;
  state.group = null;
  state.traces = { events: [], traced: [], silent: [] };
  document.title = `${view.title} · Chronik`;
  live.listen(view.query);
  draw();
}

// -- events -------------------------------------------------------------------------------------------------------------

function heard(event, data) {
  state.heardAt = Date.now();
  if (event === "traces") {
    const { events } = state.traces;
    events.push(...(data.events ?? []));
    events.splice(0, Math.max(0, events.length - TRACES_MAX));
    Object.assign(state.traces, { traced: data.traced_topics ?? [], silent: data.silent_nodes ?? [] });
  } else {
    state[event] = data;
  }
  if (event === "topics" && data.topics) {
    note("rate", data.topics.reduce((sum, line) => sum + (line.rate ?? 0), 0));
    note("lag", data.topics.reduce((most, line) => Math.max(most, line.lag ?? 0), 0));
    for (const line of data.topics) note(`topic ${line.name} rate`, line.rate);
  } else if (event === "topic" && data.partitions) {
    for (const line of data.partitions) {
      note(`partition ${data.name} ${line.partition} rate`, line.rate);
      note(`partition ${data.name} ${line.partition} lag`, line.lag);
      noteSample(data.name, line);
    }
  } else if (event === "groups" && data.groups) {
    for (const line of data.groups) note(`group ${line.group} lag`, line.lag);
  } else if (event === "group" && data.partitions) {
    note(`group ${data.group} lag`, data.lag);
    for (const line of data.partitions) note(`group ${data.group} ${line.topic} ${line.partition} lag`, line.lag);
  }
  view?.heard?.(event, data, state);
  draw();
}

function connected(isConnected) {
  if (state.isConnected === isConnected) return;
  state.isConnected = isConnected;
  draw();
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function draw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    show(document.getElementById("top"), top());
    show(document.getElementById("notice"), notice());
    const main = document.getElementById("main");
    main.classList.toggle("old", state.isConnected === false);
    show(main, h("div", { class: "view", "data-key": location.hash.split("?")[0] || "#/" }, view.draw(state)));
  });
}

function top() {
  const [kind] = route();
  const { cluster } = state;
  const link = (href, text, isHere) => h("a", { href, "aria-current": isHere ? "page" : null }, text);
  const status = state.isConnected === null ? "connecting" : state.isConnected ? "live" : "not connected";
  return [
    h("a", { class: "brand", href: "#/" }, h("img", { src: "/page/icon.svg", alt: "", width: 20, height: 20 }), "Chronik"),
    h("nav", { "aria-label": "Pages" }, link("#/", "Cluster", !kind || kind === "topics"), link("#/groups", "Groups", kind === "groups"), link("#/schemas", "Schemas", kind === "schemas")),
    h(
      "p",
      { class: "server", id: "connection" },
      cluster?.node_id !== undefined && h("span", { class: "node" }, `node ${cluster.node_id}`),
      state.session?.principal && h("span", { class: "user", title: state.session.principal }, state.session.principal.replace(/^User:/, "")),
      state.session?.csrf && h("button", { type: "button", class: "plain", onclick: logOut }, "Log out"),
      h("span", { class: `dot ${state.isConnected ? "ok" : state.isConnected === null ? "" : "bad"}` }),
      h("span", null, status),
    ),
  ];
}

function notice() {
  const { cluster } = state;
  const node = cluster?.node_id !== undefined ? `node ${cluster.node_id}` : "this node";
  if (state.isConnected === false) {
    const since = state.heardAt ? ` The data shown is from ${clock(state.heardAt)}.` : "";
    return h("p", { class: "notice bad" }, h("strong", null, `Not connected to ${node} at ${location.host}.`), `${since} Retrying every second.`);
  }
  if (cluster && cluster.is_ready === false) {
    return h("p", { class: "notice warn" }, h("strong", null, `${node[0].toUpperCase()}${node.slice(1)} is not serving:`), " it is starting, stopping or disconnected from the controller. Try another node.");
  }
  return null;
}

const live = new Live(heard, connected);
document.getElementById("skip").onclick = (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
};
addEventListener("hashchange", go);
setInterval(draw, 1000);
keepSession((session) => {
  state.session = session;
  draw();
});
go();
