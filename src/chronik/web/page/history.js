// The last two minutes of every number that is plotted. Bounded in points and in series.

const POINTS_MAX = 240;
const SERIES_MAX = 5000;
const SPAN_MS = 120000;

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

export { SPAN_MS };
