// Numbers as people read them, each with its unit.

export const MISSING = "–";
const NARROW = "\u202f"; // between a number and its unit, which stay on one line

function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : size >= 0.01 ? value.toFixed(2) : value.toPrecision(1);
}

// 12.30 -> 12.3, 5.00 -> 5
function trimmed(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function scaled(value, base, units) {
  let step = 0;
  while (Math.abs(value) >= base && step < units.length - 1) {
    value /= base;
    step += 1;
  }
  return `${trimmed(digits(value))}${units[step] ? NARROW + units[step] : ""}`;
}

export function bytes(value) {
  if (value == null) return MISSING;
  return scaled(Math.round(value), 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
}

export function bytesPerSecond(value) {
  return value == null ? MISSING : `${bytes(value)}/s`;
}

export function count(value) {
  return value == null ? MISSING : scaled(value, 1000, ["", "k", "M", "G", "T"]);
}

export function perSecond(value) {
  return value == null ? MISSING : `${count(value)}/s`;
}

export function percent(value) {
  if (value == null) return MISSING;
  const text = value >= 0.9995 || value === 0 ? (100 * value).toFixed(0) : (100 * value).toFixed(1);
  return `${trimmed(text)}${NARROW}%`;
}

export function seconds(value) {
  if (value == null) return MISSING;
  if (value === 0) return `0${NARROW}s`;
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (value >= size) return `${trimmed(digits(value / size))}${NARROW}${unit}`;
  }
  return `${(value / 1e-9).toFixed(0)}${NARROW}ns`;
}

// 3 d 4 h, 5 min 6 s
export function age(value) {
  if (value == null) return MISSING;
  let left = Math.max(0, Math.floor(value));
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (left >= size || (unit === "s" && parts.length === 0)) parts.push(`${Math.floor(left / size)}${NARROW}${unit}`);
    left %= size;
  }
  return parts.slice(0, 2).join(" ");
}

export function clock(unixSeconds, withSeconds = true) {
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  return new Date(unixSeconds * 1000).toLocaleTimeString([], withSeconds ? { ...parts, second: "2-digit" } : parts);
}
