// Stall windows: when a watermark stood although records waited behind it, or a fetch took longer than it may.
// From what the page sampled itself, and from traces, which know more precisely. Bounded in number.

const STANDS_MS = 1000;
const WINDOWS_MAX = 200;
const FETCH_LATE_MS = 1000;

const sampled = []; // {topic, partition, from, to, what}
const open = new Map();

// One partition as the node told it now.
export function noteSample(topic, line, now = Date.now()) {
  const key = `${topic} ${line.partition}`;
  const stands = line.stands_ms >= STANDS_MS;
  const known = open.get(key);
  if (stands) {
    const what = `watermark stands at ${line.high_watermark}, the log ends at ${line.log_end_offset}`;
    if (known) Object.assign(known, { what, seen: now });
    else {
      const fresh = { topic, partition: line.partition, from: now - line.stands_ms, to: null, seen: now, what };
      open.set(key, fresh);
      sampled.push(fresh);
      if (sampled.length > WINDOWS_MAX) sampled.shift();
    }
  } else if (known && line.stands_ms === 0) {
    known.to = now;
    open.delete(key);
  }
}

export const sampledWindows = (topic) => sampled.filter((window) => window.topic === topic);

// Windows that the traces of one topic show, oldest first.
export function tracedWindows(events) {
  const found = [];
  const waiting = new Map(); // By partition: what was appended and is not yet below the watermark.
  const fetches = new Map();
  for (const event of events) {
    const at = event.time_ms;
    if (event.kind === "produce-appended") {
      if (!waiting.has(event.partition)) waiting.set(event.partition, []);
      waiting.get(event.partition).push({ at, last: event.last_offset });
    } else if (event.kind === "watermark-updated" && event.why !== "leader") {
      const list = waiting.get(event.partition) ?? [];
      const waited = list.filter((one) => one.last < event.new);
      waiting.set(event.partition, list.filter((one) => one.last >= event.new));
      const first = waited[0];
      if (first && at - first.at >= STANDS_MS) {
        found.push({ partition: event.partition, from: first.at, to: at, what: `watermark stood at ${event.old}, then rose to ${event.new} (${event.why})` });
      }
    } else if (event.kind === "fetch-started") {
      fetches.set(`${event.node} ${event.fetch} ${event.partition}`, event);
    } else if (event.kind === "fetch-served") {
      const started = fetches.get(`${event.node} ${event.fetch} ${event.partition}`);
      fetches.delete(`${event.node} ${event.fetch} ${event.partition}`);
      const late = event.elapsed_ms - (started?.max_wait_ms ?? event.elapsed_ms);
      if (late >= FETCH_LATE_MS) {
        found.push({ partition: event.partition, from: at - event.elapsed_ms, to: at, what: `fetch of ${event.client_id ?? "a client"} at ${event.offset} took ${Math.round(event.elapsed_ms)} ms on node ${event.node}` });
      }
    }
  }
  return found.slice(-WINDOWS_MAX);
}

// Sampled and traced ones together: a traced one stands for the sampled ones that it overlaps.
export function windows(topic, events) {
  const traced = tracedWindows(events);
  const rest = sampledWindows(topic).filter(
    (one) => !traced.some((other) => other.partition === one.partition && one.to !== null && other.from <= one.to && other.to >= one.from),
  );
  return [...rest, ...traced].sort((one, other) => other.from - one.from);
}
