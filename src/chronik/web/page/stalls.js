// Stall windows: a watermark was stuck although the log had records beyond it, or a fetch took too long.
// They come from the page's own samples, and from traces, which are more precise. Their number is bounded.

const STUCK_MS = 1000;
const WINDOWS_MAX = 200;
const FETCH_LATE_MS = 1000;

const sampled = []; // {topic, partition, from, to, what}
const open = new Map();

// Records the current state of one partition.
export function noteSample(topic, line, now = Date.now()) {
  const key = `${topic} ${line.partition}`;
  const isStuck = line.stuck_ms >= STUCK_MS;
  const known = open.get(key);
  if (isStuck) {
    const what = `watermark stuck at ${line.high_watermark}, log end at ${line.log_end_offset}`;
    if (known) Object.assign(known, { what, seen: now });
    else {
      const fresh = { topic, partition: line.partition, from: now - line.stuck_ms, to: null, seen: now, what };
      open.set(key, fresh);
      sampled.push(fresh);
      if (sampled.length > WINDOWS_MAX) sampled.shift();
    }
  } else if (known && line.stuck_ms === 0) {
    known.to = now;
    open.delete(key);
  }
}

export const sampledWindows = (topic) => sampled.filter((window) => window.topic === topic);

// The windows in the traces of one topic, oldest first.
export function tracedWindows(events) {
  const stalls = [];
  const waiting = new Map(); // By partition: appended batches that the watermark has not passed.
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
      if (first && at - first.at >= STUCK_MS) {
        stalls.push({ partition: event.partition, from: first.at, to: at, what: `watermark was stuck at ${event.old}, then rose to ${event.new} (${event.why})` });
      }
    } else if (event.kind === "fetch-started") {
      fetches.set(`${event.node} ${event.fetch} ${event.partition}`, event);
    } else if (event.kind === "fetch-served") {
      const started = fetches.get(`${event.node} ${event.fetch} ${event.partition}`);
      fetches.delete(`${event.node} ${event.fetch} ${event.partition}`);
      const late = event.elapsed_ms - (started?.max_wait_ms ?? event.elapsed_ms);
      if (late >= FETCH_LATE_MS) {
        stalls.push({ partition: event.partition, from: at - event.elapsed_ms, to: at, what: `fetch of ${event.client_id ?? "a client"} at ${event.offset} took ${Math.round(event.elapsed_ms)} ms on node ${event.node}` });
      }
    }
  }
  return stalls.slice(-WINDOWS_MAX);
}

// Sampled and traced windows. A traced window replaces the sampled ones that it overlaps.
export function windows(topic, events) {
  const traced = tracedWindows(events);
  const others = sampledWindows(topic).filter(
    (one) => !traced.some((other) => other.partition === one.partition && one.to !== null && other.from <= one.to && other.to >= one.from),
  );
  return [...others, ...traced].sort((one, other) => other.from - one.from);
}
