// The last two minutes of every plotted number, bounded in points and in series, and a small plot of it as inline SVG.

import { h } from "./dom.js";

const POINTS_MAX = 240;
const SERIES_MAX = 5000;
const SPAN_MS = 120000;
const WIDTH = 120;
const HEIGHT = 26;
const GAP_MS = 6000;

const series = new Map();

export function note(name, value, at = Date.now()) {
  if (value === null || value === undefined) return;
  if (!series.has(name)) {
    if (series.size >= SERIES_MAX) series.clear();
    series.set(name, []);
  }
  const points = series.get(name);
  points.push({ at, value });
  if (points.length > POINTS_MAX) points.shift();
}

export function recent(name, now = Date.now()) {
  return (series.get(name) ?? []).filter((point) => point.at >= now - SPAN_MS);
}

// `name` is the series; `label` and `format` are for screen readers. The scale does not shrink below `floor`, so that a
// lag of two records does not look large.
export function spark(name, label, format, tone = "", floor = 0) {
  const now = Date.now();
  const points = recent(name, now);
  const highest = Math.max(1e-9, ...points.map((point) => point.value));
  const last = points.length ? points[points.length - 1].value : null;
  const x = (at) => (WIDTH - 2 - ((now - at) / SPAN_MS) * (WIDTH - 4)).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (value / Math.max(floor, highest)) * (HEIGHT - 5)).toFixed(1);
  let line = "";
  let area = "";
  let from = null;
  points.forEach((point, at) => {
    const before = points[at - 1];
    const begins = !before || point.at - before.at > GAP_MS;
    if (begins && from) area += `L${x(before.at)} ${HEIGHT - 1}Z`;
    if (begins) from = point;
    line += `${begins ? "M" : "L"}${x(point.at)} ${y(point.value)}`;
    area += begins ? `M${x(point.at)} ${HEIGHT - 1}L${x(point.at)} ${y(point.value)}` : `L${x(point.at)} ${y(point.value)}`;
  });
  if (from) area += `L${x(points[points.length - 1].at)} ${HEIGHT - 1}Z`;
  const words = last === null ? `${label}: no data yet` : `${label}: now ${format(last)}, at most ${format(highest < 1e-6 ? 0 : highest)} in two minutes`;
  return h(
    "svg",
    { class: `spark ${tone}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": words },
    h("title", null, words),
    h("line", { class: "base", x1: 2, x2: WIDTH - 2, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
    area && h("path", { class: "area", d: area }),
    line && h("path", { class: "line", d: line }),
  );
}
