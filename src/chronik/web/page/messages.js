// The message browser: records by offset, by time, or the newest.

import { h } from "./dom.js";
import { clock, count, moment } from "./format.js";
import { empty, error, getJson, panel } from "./parts.js";
import { payloadView } from "./payload.js";

const LIMIT = 50;
const TOGETHER_MAX = 12; // Partitions that are shown in one list.
const PREVIEW_CHARACTERS = 240;
const FOLLOW_MS = 900;

export function messages(name, draw) {
  const request = { partition: null, from: "newest", offset: "0", time: "", isFollowing: true };
  let pages = null; // One for each requested partition.
  let failure = null;
  let isLoading = false;
  let isStale = false;
  let followedAt = 0;
  const open = new Set();
  const whole = new Map(); // Complete messages that are truncated in the list.

  // Loads the requested records; `only` lists the partitions that have new ones.
  async function load(change = {}, only = null) {
    Object.assign(request, change);
    if (isLoading) {
      isStale = isStale || only === null;
      return;
    }
    isLoading = true;
    draw();
    try {
      const partitions = request.partition === "all" ? request.together : [request.partition];
      const stale = only ?? partitions;
      const fresh = await Promise.all(stale.map((partition) => getJson(path(partition))));
      pages = partitions.map((partition) => fresh.find((page) => page.partition === partition) ?? pages?.find((page) => page.partition === partition)).filter(Boolean);
      failure = null;
    } catch (problem) {
      failure = problem.message;
    }
    isLoading = false;
    draw();
    if (isStale) {
      isStale = false;
      load();
    }
  }

  function path(partition) {
    const query = new URLSearchParams({ partition, limit: LIMIT });
    if (request.from === "offset") query.set("offset", request.offset || "0");
    if (request.from === "time" && request.time) query.set("time", new Date(request.time).getTime());
    return `/api/topics/${encodeURIComponent(name)}/messages?${query}`;
  }

  // New records are shown as they become visible to consumers.
  function heard(event, data) {
    if (event !== "topic" || !data.partitions) return;
    if (request.partition === null) {
      request.together = data.partitions.map((line) => line.partition).slice(0, TOGETHER_MAX);
      load({ partition: data.partitions.length > TOGETHER_MAX ? 0 : "all" });
    }
    if (request.from !== "newest" || !request.isFollowing || !pages || Date.now() - followedAt < FOLLOW_MS) return;
    const grown = pages
      .filter((page) => (data.partitions[page.partition]?.high_watermark ?? -1) > page.high_watermark)
      .map((page) => page.partition);
    if (!grown.length) return;
    followedAt = Date.now();
    load({}, grown);
  }

  async function loadWhole(message) {
    const key = `${message.partition}-${message.offset}`;
    try {
      const page = await getJson(`/api/topics/${encodeURIComponent(name)}/messages?partition=${message.partition}&offset=${message.offset}&limit=1`);
      if (page.messages[0]?.offset === message.offset) whole.set(key, page.messages[0]);
    } catch (problem) {
      failure = problem.message;
    }
    draw();
  }

  function list() {
    const all = (pages ?? []).flatMap((page) => page.messages.map((message) => ({ ...message, partition: page.partition })));
    if (request.from === "newest") all.sort((one, other) => other.timestamp_ms - one.timestamp_ms || other.offset - one.offset);
    else all.sort((one, other) => (request.partition === "all" ? one.timestamp_ms - other.timestamp_ms : 0) || one.offset - other.offset);
    return all.slice(0, request.partition === "all" ? LIMIT * 2 : LIMIT);
  }

  function form(known) {
    const together = known.partitions.length <= TOGETHER_MAX;
    const option = (value, text, selected) => h("option", { value, selected }, text);
    const field = (label, control) => {
      control.setAttribute("aria-label", label);
      return h("label", { class: "field" }, h("span", null, label), control);
    };
    return h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); read(event.target); } },
      field("Partition", h("select", { name: "partition", "data-key": `${known.partitions.length} partitions`, "data-static": true, onchange: (event) => read(event.target.form) },
        together && known.partitions.length > 1 && option("all", "all"),
        known.partitions.map((line) => option(line.partition, line.partition, line.partition === request.partition)))),
      field("From", h("select", { name: "from", "data-static": true, onchange: (event) => read(event.target.form) },
        option("newest", "the newest"), option("offset", "an offset"), option("time", "a time"))),
      request.from === "offset" && field("Offset", h("input", { "data-key": "offset", name: "offset", type: "number", min: 0, step: 1, value: request.offset, "data-static": true })),
      request.from === "time" && field("Time", h("input", { "data-key": "time", name: "time", type: "datetime-local", step: 1, value: request.time, "data-static": true })),
      request.from === "newest" && h("label", { class: "check", "data-key": "follow" }, h("input", { type: "checkbox", name: "follow", checked: request.isFollowing, "data-static": true, onchange: (event) => { request.isFollowing = event.target.checked; } }), "follow"),
      h("button", { type: "submit", "data-key": "go" }, isLoading && !pages ? "Reading…" : "Read"));
  }

  function read(form) {
    const partition = form.elements.partition.value;
    load({
      partition: partition === "all" ? "all" : Number(partition),
      from: form.elements.from.value,
      offset: form.elements.offset?.value ?? request.offset,
      time: form.elements.time?.value ?? request.time,
    });
  }

  function paging() {
    if (request.partition === "all" || !pages?.length) return null;
    const [page] = pages;
    const first = page.messages[0]?.offset ?? page.next ?? page.high_watermark;
    const to = (offset) => {
      load({ from: "offset", offset: String(Math.max(page.log_start_offset, offset)) });
      const select = document.querySelector("form.controls [name=from]");
      if (select) select.value = "offset";
    };
    return h("p", { class: "paging" },
      h("button", { type: "button", disabled: first <= page.log_start_offset, onclick: () => to(first - LIMIT) }, "Older"),
      h("button", { type: "button", disabled: page.next === null, onclick: () => to(page.next) }, "Newer"),
      h("span", { class: "muted" }, `offsets ${count(page.log_start_offset)} to ${count(page.high_watermark)}`));
  }

  function row(message) {
    const key = `${message.partition}-${message.offset}`;
    const full = whole.get(key) ?? message;
    const isOpen = open.has(key);
    return h("li", { "data-key": key },
      h("details", { open: isOpen, ontoggle: (event) => { event.target.open ? open.add(key) : open.delete(key); draw(); } },
        h("summary", null,
          h("span", { class: "offset" }, `${message.partition}:${count(message.offset)}`),
          h("time", { datetime: message.timestamp_ms >= 0 ? new Date(message.timestamp_ms).toISOString() : null, title: `${moment(message.timestamp_ms)} (${message.timestamp_type})` }, message.timestamp_ms < 0 ? "–" : clock(message.timestamp_ms)),
          h("span", { class: "key" }, preview(message.key)),
          h("span", { class: "value" }, message.error ? h("span", { class: "bad" }, message.error) : preview(message.value))),
        isOpen && h("div", { class: "record" },
          h("p", { class: "muted" }, `Partition ${message.partition}, offset ${count(message.offset)}, ${moment(message.timestamp_ms)} (${message.timestamp_type})`),
          payloadView("Key", full.key, `${key} key`, draw, () => loadWhole(message)),
          payloadView("Value", full.value, `${key} value`, draw, () => loadWhole(message)),
          headers(full))));
  }

  function headers(message) {
    if (!message.headers?.length) return h("p", { class: "muted" }, "No headers.");
    return h("div", { class: "content" }, h("h3", null, "Headers"),
      h("dl", { class: "headers" }, message.headers.map((header) => [h("dt", null, header.name), h("dd", null, preview(header.value))])),
      message.headers_left_out > 0 && h("p", { class: "muted" }, `and ${message.headers_left_out} more`));
  }

  return {
    heard,
    draw(known) {
      const records = list();
      const replica = pages?.find((page) => page.source === "replica");
      return panel("Messages", null,
        form(known),
        failure && error(failure),
        replica && h("p", { class: "notice warn" }, `The leader of partition ${replica.partition} does not answer. These records are from the replica on node ${replica.node}, up to the high watermark that it knows.`),
        records.length ? h("ol", { class: "messages" }, records.map(row)) : pages && !failure ? empty("There are no records from this position on.") : null,
        paging());
    },
  };
}

function preview(content) {
  if (content === null || content === undefined) return h("span", { class: "null" }, "null");
  if (content.size_bytes === 0) return h("span", { class: "null" }, "empty");
  if (content.encoding === "base64") return h("span", { class: "binary" }, `${content.data.slice(0, 60)}`);
  return content.data.length > PREVIEW_CHARACTERS ? `${content.data.slice(0, PREVIEW_CHARACTERS)}…` : content.data;
}
