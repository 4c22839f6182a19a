// Asks /v1/history again and again while the page is seen, and draws what it says.

import { SizeChart, TimeChart, element } from "./chart.js";
import * as format from "./format.js";

const POLL_MS = 2000;
const PATIENCE_MS = 8000;
const SHORTEST_S = 60;
const { MISSING } = format;
const DRAM = "dram";
const NVME = "nvme";
const SHARED = "shared";
const STORE_STATES = { closed: "in use", open: "away", half_open: "away, being tried" };

const CHARTS = [
  { title: "Hit rate", note: "Of the tokens looked up, by the tier that had them", wide: true, stacked: true, max: 1,
    format: format.percent, empty: "Nothing has been looked up",
    series: [{ name: "DRAM", color: DRAM, column: "hit_dram" }, { name: "NVMe", color: NVME, column: "hit_nvme" },
      { name: "Shared", color: SHARED, column: "hit_shared", optional: true }] },
  { title: "Fullness", note: "Of each tier’s capacity", max: 1, format: format.percent, empty: "No tier yet",
    series: [{ name: "DRAM", color: DRAM, column: "dram_full" }, { name: "NVMe", color: NVME, column: "nvme_full" }] },
  { title: "Into the tiers", note: "Stored by engines; written to NVMe and the shared store", format: format.bytesPerSecond, base: 1024,
    floor: 1024, empty: "Nothing has been stored",
    series: [{ name: "DRAM", color: DRAM, column: "dram_in_bytes" }, { name: "NVMe", color: NVME, column: "nvme_in_bytes" },
      { name: "Shared", color: SHARED, column: "shared_in_bytes", optional: true }] },
  { title: "Out of the tiers", note: "Loaded by engines; brought up from NVMe and the shared store", format: format.bytesPerSecond,
    base: 1024, floor: 1024, empty: "Nothing has been loaded",
    series: [{ name: "DRAM", color: DRAM, column: "dram_out_bytes" }, { name: "NVMe", color: NVME, column: "nvme_out_bytes" },
      { name: "Shared", color: SHARED, column: "shared_out_bytes", optional: true }] },
  { title: "Lookups", note: "Time of a match in the daemon", format: format.seconds, floor: 1e-6,
    empty: "Nothing has been looked up",
    series: [{ name: "p50", color: "median", column: "match_p50_s" }, { name: "p99", color: "tail", column: "match_p99_s" }] },
  { title: "Disks", note: "Time of a block to or from NVMe, waiting included", format: format.seconds, floor: 1e-6,
    empty: "No disk has been used",
    series: [{ name: "read p50", color: "median", column: "disk_read_p50_s" },
      { name: "read p99", color: "tail", column: "disk_read_p99_s" },
      { name: "write p99", color: NVME, column: "disk_write_p99_s", dashed: true }] },
  { title: "Evictions", note: "Blocks that made room for others", format: format.perSecond, floor: 1,
    empty: "Nothing has been seen yet",
    series: [{ name: "DRAM", color: DRAM, column: "dram_evicted" }, { name: "NVMe", color: NVME, column: "nvme_evicted" }] },
  { title: "Queues", note: "What waits", format: format.count, floor: 4, empty: "Nothing has been seen yet",
    series: [{ name: "blocks to write", color: NVME, column: "queue_write" },
      { name: "blocks to send", color: SHARED, column: "queue_shared", optional: true },
      { name: "on disks", color: "tail", column: "queue_disk" },
      { name: "requests", color: DRAM, column: "queue_requests" }] },
];

const find = (id) => document.getElementById(id);
const page = { rows: [], last: 0, life: "", range: 300, gone: null, now: 0 };
const charts = CHARTS.map((options) => {
  const figure = element("figure", { class: options.wide ? "card wide" : "card" });
  find("charts").append(figure);
  return new TimeChart(figure, options);
});
const whatIf = new SizeChart(find("whatif"), { title: "Hit rate at other sizes", formatSize: format.bytes,
  format: format.percent, color: "tail", empty: "Not enough data yet" });
const tiles = new Map(["Hit rate", "Tokens reused", "DRAM", "NVMe", "Shared", "Lookup p99", "Evicted"].map((name) => {
  const value = element("dd", {}, "–");
  const note = element("dd", { class: "note" }, "\u00a0");
  const meter = name === "DRAM" || name === "NVMe" ? element("meter", { min: 0, max: 1, value: 0, "data-color":
    name.toLowerCase(), "aria-label": `${name} used` }) : null;
  const card = element("div", { class: "card tile", hidden: name === "Shared" }, element("dt", {}, name), value, note,
    meter && element("dd", { class: "meter" }, meter));
  find("tiles").append(card);
  return [name, { card, value, note, meter }];
}));

// --- what the page knows -----------------------------------------------------------------------

function takeIn(told) {
  if (told.life !== page.life) Object.assign(page, { rows: [], life: told.life });
  for (const [number, t, values] of told.samples) {
    const row = Object.fromEntries(told.columns.map((column, place) => [column, values[place]]));
    row.dram_full = row.dram_capacity_bytes ? row.dram_bytes / row.dram_capacity_bytes : null;
    row.nvme_full = row.nvme_capacity_bytes ? row.nvme_bytes / row.nvme_capacity_bytes : null;
    page.rows.push({ t, ...row });
    page.last = number;
  }
  page.rows = page.rows.filter(({ t }) => t > told.now_unix_s - told.keep_s);
  page.now = told.now_unix_s;
}

// The mean of a column over the time shown, weighted by another one if there is any.
function mean(column, weight) {
  const rows = page.rows.filter((row) => row.t > page.now - page.range && row[column] != null);
  const weights = rows.map((row) => (weight ? row[weight] : 1));
  const total = weights.reduce((sum, one) => sum + one, 0);
  return total ? rows.reduce((sum, row, place) => sum + row[column] * weights[place], 0) / total : null;
}

// The last and the largest value of a column in the time shown.
function lastAndWorst(column) {
  const seen = page.rows.filter((row) => row.t > page.now - page.range && row[column] != null).map((row) => row[column]);
  return seen.length ? [seen[seen.length - 1], Math.max(...seen)] : [null, null];
}

// --- drawing -----------------------------------------------------------------------------------

function drawOverTime() {
  // What began a minute ago fills the chart, and is no line at its right edge.
  const first = Math.min(page.rows[0]?.t ?? page.now, page.now - SHORTEST_S);
  for (const chart of charts) chart.update(page.rows, Math.max(first, page.now - page.range), page.now);
  const span = page.range === 300 ? "last 5 min" : "last 30 min";
  const dram = mean("hit_dram", "asked_tokens");
  const below = mean("hit_nvme", "asked_tokens") + (mean("hit_shared", "asked_tokens") ?? 0);
  const asked = mean("asked_tokens");
  const hit = dram == null ? null : dram + below;
  show("Hit rate", format.percent(hit), hit == null ? "nothing looked up" : `of tokens, ${span}`);
  show("Tokens reused", hit == null ? "–" : format.perSecond(asked * hit), `of ${format.perSecond(asked)} asked for`);
  const [p99, worst] = lastAndWorst("match_p99_s");
  show("Lookup p99", format.seconds(p99), p99 == null ? "nothing looked up" : `${format.seconds(worst)} at worst, ${span}`);
  const evicted = mean("dram_evicted");
  show("Evicted", evicted == null ? "–" : format.perSecond(evicted), `from DRAM, ${span}`);
}

function show(name, value, note) {
  const tile = tiles.get(name);
  tile.value.textContent = value;
  tile.note.textContent = note;
}

function drawState(stats) {
  find("where").textContent = stats.daemon.run_dir;
  for (const place of document.querySelectorAll(".address")) place.textContent = stats.daemon.run_dir;
  find("footer").textContent = `tiercache ${stats.daemon.version}, pid ${stats.daemon.pid}, up for ` +
    `${format.age(stats.daemon.uptime_s)}, ${format.bytes(stats.daemon.rss_besides_arena_bytes)} besides its arena`;
  for (const [name, key] of [["DRAM", "dram"], ["NVMe", "nvme"]]) {
    const tier = stats.tiers[key];
    show(name, tier ? format.bytes(tier.bytes) : "none", tier
      ? `of ${format.bytes(tier.capacity_bytes)}, ${format.count(tier.blocks)} blocks` : "not configured");
    const meter = tiles.get(name).meter;
    meter.value = tier && tier.capacity_bytes ? tier.bytes / tier.capacity_bytes : 0;
    meter.hidden = !tier;
  }
  drawStore(stats.tiers.shared);
  drawWhatIf(stats);
  drawPrefixes(stats);
  drawNamespaces(stats);
  drawSessions(stats);
}

// The store does not say how much it has: whether it is there, and what this host got of it.
function drawStore(shared) {
  tiles.get("Shared").card.hidden = !shared;
  for (const chart of charts) chart.choose(new Set(shared ? [SHARED] : []));
  if (!shared) return;
  const bad = shared.bad_blocks ? `, ${format.count(shared.bad_blocks)} bad` : "";
  show("Shared", STORE_STATES[shared.breaker.state] ?? shared.breaker.state,
    `${format.bytes(shared.fetched_bytes)} fetched, ${format.bytes(shared.written_bytes)} sent${bad}`);
}

function drawWhatIf(stats) {
  const { curve = [], sample_rate: rate, window_s: windowS } = stats.what_if ?? {};
  whatIf.update(curve.map((point) => ({ size: point.capacity_bytes, value: point.hit_rate })),
    Object.values(stats.tiers).reduce((sum, tier) => sum + (tier.capacity_bytes ?? 0), 0));
  find("whatif-note").textContent = curve.length < 2 ? "What a cache of another size would have found"
    : `Estimated from ${format.percent(rate)} of blocks over ${format.age(windowS)}`;
}

// Rows of cells: a text, or { text, ...attributes }. Columns: { name, right }.
function fill(id, columns, rows, empty) {
  const place = find(id).querySelector(".scroll");
  if (rows.length === 0) {
    place.replaceChildren(element("p", { class: "nothing" }, empty));
    return;
  }
  const cell = (kind, content, { right }, attributes = {}) =>
    element(kind, { class: right ? "right" : null, ...attributes }, ...(Array.isArray(content) ? content : [content]));
  const head = element("tr", {}, ...columns.map((column) => cell("th", column.name, column, { scope: "col" })));
  const body = rows.map((row) => element("tr", {}, ...row.map((content, number) =>
    number === 0 ? cell("th", content, columns[0], { scope: "row" }) : cell("td", content, columns[number]))));
  place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function drawPrefixes(stats) {
  const prefixes = stats.hot_prefixes ?? [];
  const below = new Map();
  prefixes.forEach((prefix, number) => {
    const list = below.get(prefix.parent) ?? [];
    list.push(number);
    below.set(prefix.parent, list);
  });
  const most = Math.max(1, ...prefixes.map(({ hits }) => hits));
  const rows = [];
  const walk = (parent, depth) => {
    for (const number of below.get(parent) ?? []) {
      const prefix = prefixes[number];
      const bar = element("meter", { min: 0, max: most, value: prefix.hits, "data-color": "tail", "aria-hidden": "true" });
      const inDram = prefix.blocks ? prefix.dram_blocks / prefix.blocks : 0;
      const name = element("code", { class: `depth-${Math.min(depth, 6)}` }, prefix.name);
      const under = depth ? element("span", { class: "unseen" }, ` below ${prefixes[parent].name}`) : "";
      rows.push([[name, under], format.count(prefix.tokens), format.bytes(prefix.bytes), format.percent(inDram),
        [bar, element("span", { class: "number" }, format.count(prefix.hits))]]);
      walk(number, depth + 1);
    }
  };
  walk(null, 0);
  fill("prefixes", [{ name: "Prefix" }, { name: "Tokens", right: true }, { name: "Size", right: true },
    { name: "In DRAM", right: true }, { name: "Hits", right: true }], rows, "No prefix has been hit yet");
}

function drawNamespaces(stats) {
  const rows = stats.namespaces.map((space) => {
    const asked = space.asked_blocks;
    const hit = asked ? (space.hit_blocks + space.hit_below_blocks) / asked : null;
    return [element("code", { title: space.fingerprint }, space.fingerprint.slice(0, 8)), modelsOf(space),
      space.tenant || MISSING, space.engine, space.dtype, space.rank, format.bytes(space.block_bytes), format.count(space.block_size),
      format.bytes(space.blocks * space.block_bytes), format.bytes(space.below_blocks * space.block_bytes),
      format.count(asked), format.percent(hit)];
  });
  const right = true;
  find("connect").hidden = rows.length > 0;
  fill("namespaces", [{ name: "Namespace" }, { name: "Model" }, { name: "Tenant" }, { name: "Engine" }, { name: "Type" }, { name: "Rank" },
    { name: "Block", right }, { name: "Tokens", right }, { name: "DRAM", right }, { name: "NVMe", right },
    { name: "Blocks asked", right }, { name: "Hit rate", right }], rows, "No engine has stored anything yet");
}

function modelsOf(space) {
  const names = space.models ?? [];
  return names.length > 1 ? element("span", { title: names.join(", ") }, `${names[0]} and ${names.length - 1} more`)
    : names[0] ?? MISSING;
}

function drawSessions(stats) {
  const rows = stats.sessions.map((session) => [session.name || MISSING, session.tenant || MISSING, String(session.pid || MISSING),
    session.mapped ? "shared memory" : "messages", session.registration, format.count(session.read_leases),
    format.count(session.write_leases), format.age(session.connected_s)]);
  const right = true;
  fill("sessions", [{ name: "Client" }, { name: "Tenant" }, { name: "Process", right }, { name: "Bytes by" }, { name: "Memory" },
    { name: "Reading", right }, { name: "Writing", right }, { name: "Connected for", right }], rows,
  "No client is connected");
}

// --- health ------------------------------------------------------------------------------------

function pill(health, text) {
  find("health").dataset.health = health;
  find("health").textContent = text;
}

function drawHealth(told) {
  const health = told.stats?.health;
  const reasons = told.reachable ? health?.reasons ?? [] : [];
  find("reasons").hidden = reasons.length === 0;
  find("reasons").replaceChildren(...reasons.map((reason) => element("li", {}, reason)));
  if (told.reachable) {
    pill(health.state, health.state === "ok" ? "Healthy" : "Degraded");
    setState("live");
  } else {
    const since = format.clock(told.problem_since_unix_s);
    pill("gone", "Not reachable");
    setState(page.last ? "stale" : "gone", `Daemon not reachable since ${since}`, told.problem);
  }
}

function setState(state, title = "", text = "") {
  document.body.dataset.state = state;
  find("alarm").hidden = !title;
  const said = title ? `${title}. ${state === "stale" ? "What is shown below is the last that it said." : ""}` : "";
  if (find("alarm").dataset.said === said + text) return; // said once, not every two seconds
  find("alarm").dataset.said = said + text;
  find("alarm").replaceChildren(element("strong", {}, said), element("span", {}, ` ${text}`));
}

function showUnreachable() {
  page.gone ??= Date.now() / 1000;
  pill("gone", "Not reachable");
  setState(page.last ? "stale" : "gone", `Daemon not reachable since ${format.clock(page.gone)}`,
    "Its HTTP port does not answer; this page goes on asking.");
}

// --- asking ------------------------------------------------------------------------------------

async function ask() {
  const query = new URLSearchParams({ after: page.last, life: page.life });
  let told;
  try {
    const answer = await fetch(`/v1/history?${query}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    told = await answer.json();
  } catch {
    showUnreachable();
    return;
  }
  page.gone = null;
  takeIn(told);
  if (told.stats) drawState(told.stats);
  drawOverTime();
  drawHealth(told);
}

async function askForEver() {
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, POLL_MS);
      document.addEventListener("visibilitychange", () => {
        clearTimeout(timer);
        resolve();
      }, { once: true });
    });
  }
}

for (const input of document.querySelectorAll("input[name=range]")) {
  input.addEventListener("change", () => {
    page.range = Number(input.value);
    drawOverTime();
  });
}
askForEver();
