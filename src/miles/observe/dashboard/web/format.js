// Numbers, durations and times as short text.

export function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function formatCount(value) {
  if (value === null || value === undefined) return "–";
  let scaled = value;
  for (const suffix of ["", "k", "M", "G"]) {
    if (Math.abs(scaled) < 999.5) return `${suffix && scaled < 99.95 ? scaled.toFixed(1) : Math.round(scaled)}${suffix}`;
    scaled /= 1000;
  }
  return `${scaled.toFixed(1)}T`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(2)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function formatTime(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString() : "–";
}

export function formatShare(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)}%`;
}

export function formatValue(value) {
  if (value === null || value === undefined) return "unset";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
