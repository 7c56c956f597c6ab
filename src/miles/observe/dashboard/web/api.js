// Queries to the server, or in a report to the values that are inside the file.

const POLL_MILLISECONDS = 1000;
const embeddedElement = document.getElementById("embedded");
const embeddedValues = embeddedElement ? JSON.parse(embeddedElement.textContent) : null;

export const isReport = embeddedValues !== null;

export class QueryFailure extends Error {}

// Spells a query as the server does (observe/dashboard/api.py), so that a report finds it.
function formatQuery(name, params) {
  const pairs = [];
  for (const key of Object.keys(params).sort()) {
    const values = Array.isArray(params[key]) ? params[key] : [params[key]];
    for (const value of values) {
      if (value === null || value === undefined || value === "") continue;
      pairs.push(`${encodeURIComponent(key)}=${encodeURIComponent(value)}`);
    }
  }
  return `${name}?${pairs.join("&")}`;
}

export async function query(name, params = {}) {
  const text = formatQuery(name, params);
  if (isReport) {
    if (text in embeddedValues) return embeddedValues[text];
    throw new QueryFailure("This is not part of the report; miles view shows all of a run.");
  }
  let response;
  try {
    response = await fetch(`/api/${text}`);
  } catch {
    throw new QueryFailure("The server does not answer; is miles view still running?");
  }
  const value = await response.json();
  if (!response.ok) throw new QueryFailure(value.error || `The server answered ${response.status}.`);
  return value;
}

// Points of metrics of several runs. A report has them without smoothing, which is then computed here.
export async function querySeries(runs, names, smooth, extra = {}) {
  if (!isReport) {
    return (await query("series", { run: runs, name: names, smooth: smooth || null, ...extra })).series;
  }
  const found = [];
  for (const run of runs) {
    for (const name of names) {
      const text = formatQuery("series", { run, name });
      if (!(text in embeddedValues)) continue;
      const series = { ...embeddedValues[text].series[0] };
      if (smooth && !name.startsWith("eval/")) series.smooth = smoothTriangular(series.y, smooth);
      found.push(series);
    }
  }
  return found;
}

// Names, units and meanings of the metrics that any of the runs has.
export async function queryMetrics(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const metric of (await query("metrics", { run })).metrics) found.set(metric.name, metric);
  }
  return [...found.values()].sort((a, b) => a.name.localeCompare(b.name));
}

function smoothTriangular(values, reach) {
  return values.map((_, centre) => {
    let total = 0;
    let weight = 0;
    for (let at = Math.max(0, centre - reach); at <= Math.min(values.length - 1, centre + reach); at += 1) {
      if (values[at] === null) continue;
      const own = reach + 1 - Math.abs(at - centre);
      total += own * values[at];
      weight += own;
    }
    return weight ? total / weight : null;
  });
}

// Calls `onChange` when a log of one of the runs has gained lines since the rows that `readRuns` returns were read;
// looks every second while the page is visible.
export function watchRuns(readRuns, onChange, onFailure) {
  if (isReport) return;
  const look = async () => {
    const rows = readRuns();
    if (!document.hidden && rows.length) {
      try {
        const now = (await query("state", { run: rows.map((row) => row.name) })).runs;
        onFailure(null);
        if (rows.some((row) => now[row.name][0] !== row.revision)) await onChange();
      } catch (error) {
        onFailure(error);
      }
    }
    setTimeout(look, POLL_MILLISECONDS);
  };
  setTimeout(look, POLL_MILLISECONDS);
}
