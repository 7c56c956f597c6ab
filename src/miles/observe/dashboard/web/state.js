// The address of a view: `#/curves?run=a&run=b&smooth=10`. Everything one sees is in it, so a link shows the same.

const AXES = ["step", "tokens", "hours"];

export function readState() {
  const [path, text] = location.hash.replace(/^#/, "").split("?");
  const params = new URLSearchParams(text || "");
  return { view: path.replace(/^\//, "") || "overview", params, runs: params.getAll("run") };
}

export function linkTo(view, runs, params) {
  const search = new URLSearchParams();
  for (const run of runs) search.append("run", run);
  for (const [name, value] of Object.entries(params || {})) {
    if (value !== null && value !== undefined && value !== "") search.set(name, value);
  }
  const text = search.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

// Changes parameters of the address without a new entry in the browser's history; the view has drawn itself already.
export function rememberParams(changes) {
  const { view, params, runs } = readState();
  const kept = {};
  for (const [name, value] of params) if (name !== "run") kept[name] = value;
  history.replaceState(null, "", linkTo(view, runs, { ...kept, ...changes }));
}

export function chooseAxis(params) {
  const axis = params.get("x");
  return AXES.includes(axis) ? axis : "step";
}

export function readInteger(params, name, fallback) {
  const value = Number.parseInt(params.get(name), 10);
  return Number.isFinite(value) ? value : fallback;
}
