"""One frame of `tiercache top`: lines of text for a terminal of given size, the important ones first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.text import Text

from tiercache.cli.readings import at
from tiercache.cli.report import printable
from tiercache.cli.top.history import IntervalHits, RecentReadings, sparkline
from tiercache.ground.units import format_bytes, format_duration

SORTS = ("asked", "hits", "blocks", "idle")
HEAD, GOOD, BAD, DIM, BAR = "bold cyan", "green", "bold red", "dim", "blue"
SHARED = "shared"
STORE_STATES = {"closed": "in use", "open": "away", "half_open": "away, being tried"}
"""Words for the states of the shared store's breaker."""
_MAX_REASONS = 3
REPORT_S = 5.0
"""How often clients report their counters (`tiercache.client.session`): rates over less time would jump."""

KEYS = (
    ("q", "leave"),
    ("p", "pause and go on"),
    ("s", f"sort namespaces by another column: {', '.join(SORTS)}"),
    ("?", "this help"),
)


class ViewState(NamedTuple):
    """The state that keys change."""

    address: str
    interval_s: float
    sort: str = SORTS[0]
    paused: bool = False
    help: bool = False


Row = tuple[str, ...]


def frame(history: RecentReadings, settings: ViewState, width: int, height: int) -> list[Text]:
    """The lines of one frame, at most `height` of them and none wider than `width`."""
    lines = [_title(history, settings, width)]
    if settings.help:
        lines += _help()
    elif history.last is None:
        lines += _gone(history)
    else:
        lines += _gone(history) if history.problem else _health(history)
        lines += _body(history, settings, width, height - len(lines))
    for line in lines:
        line.truncate(width)
    return lines[:height]


def _title(history: RecentReadings, settings: ViewState, width: int) -> Text:
    daemon = history.last.tree.get("daemon", {}) if history.last else {}
    left = f"tiercache {daemon.get('version', '')}  {settings.address}"
    if daemon:
        left += f"  pid {daemon.get('pid')}  up {format_duration(at({'d': daemon}, 'd.uptime_s'))}"
    pace = "paused" if settings.paused else f"every {settings.interval_s:g} s"
    right = f"{pace}  {time.strftime('%H:%M:%S')}"
    text = Text(left[: max(0, width - len(right) - 2)], style="bold")
    text.append(" " * max(2, width - len(text.plain) - len(right)) + right, style="reverse" if settings.paused else DIM)
    return text


def _gone(history: RecentReadings) -> list[Text]:
    lines = [Text("the daemon is gone; waiting for it", style=BAD)]
    if history.problem:
        lines.append(Text(f"  {printable(history.problem)}", style=DIM))
    if history.last is not None:
        lines.append(Text("  below: as it was when it answered last", style=DIM))
    return lines


def _health(history: RecentReadings) -> list[Text]:
    assert history.last is not None
    health = history.last.tree.get("health", {})
    reasons = [str(reason) for reason in health.get("reasons", [])]
    since = f"; restarted {history.restarts} times while watching" if history.restarts else ""
    if not reasons:
        return [Text(f"health: {health.get('state', 'unknown')}{since}", style=GOOD)]
    lines = [Text(f"health: {health.get('state')}{since}", style=BAD)]
    lines += [Text(f"  {printable(reason)}", style=BAD) for reason in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        lines.append(Text(f"  and {len(reasons) - _MAX_REASONS} more: tiercache stats", style=BAD))
    return lines


def _help() -> list[Text]:
    said = [
        Text(""),
        *(Text(f"  {key}   {what}") for key, what in KEYS),
        Text(""),
        Text("Rates are of the last interval. in: stored by clients, or written to disks; out: named or sent to"),
        Text("clients, or read from disks. Hit rates are by tokens. Hot prefixes: hits are weighted by age."),
    ]
    return [*said, Text("Any key goes back.", style=DIM)]


def _body(history: RecentReadings, settings: ViewState, width: int, room: int) -> list[Text]:
    lines = [*_tiers(history, width), *_hits(history, width), *_counts(history)]
    lists = [_quotas(history), _namespaces(history, settings), _hot(history), _clients(history)]
    lists = [rows for rows in lists if len(rows) > 1]
    left = room - len(lines)
    for place, rows in enumerate(lists):
        # Each list gets an equal part of the remaining lines, and those that earlier lists did not need.
        share = left // (len(lists) - place)
        shown = rows[: max(0, share)]
        if 0 < len(shown) < len(rows):
            shown[-1] = Text(f"  and {len(rows) - len(shown) + 1} more", style=DIM)
        lines += shown
        left -= len(shown)
    return lines


def _tiers(history: RecentReadings, width: int) -> list[Text]:
    assert history.last is not None
    tree, change = history.last.tree, history.change
    moved: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "dram": (("counters.stored_bytes",), ("traffic.read_bytes",)),
        "nvme": (("tiers.nvme.written_bytes",), ("tiers.nvme.promoted_bytes", "tiers.nvme.direct_bytes")),
        SHARED: (("tiers.shared.written_bytes",), ("tiers.shared.fetched_bytes",)),
    }
    bar = max(0, min(24, width - 66))
    lines = [Text(f"{'TIER':<7}{'BLOCKS':>9}{'USED':>11}{'OF':>11}{'IN/S':>11}{'OUT/S':>11}  FULL", style=HEAD)]
    for name, tier in tree.get("tiers", {}).items():
        used, capacity = at(tier, "bytes"), at(tier, "capacity_bytes")
        if name == "dram":
            capacity = at(tree, "arena.bytes") or capacity
        into, out = moved.get(name, ((), ()))
        rates = [format_bytes(change.rate(*paths)) if change else "-" for paths in (into, out)]
        if name == SHARED:
            lines.append(_store(tier, rates))
            continue
        share = used / capacity if capacity else 0.0
        line = Text(f"{name:<7}{int(at(tier, 'blocks')):>9,}{format_bytes(used):>11}{format_bytes(capacity):>11}")
        line.append(f"{rates[0]:>11}{rates[1]:>11}  {share:>4.0%} ")
        line.append("█" * round(share * bar), style=BAR)
        line.append("░" * (bar - round(share * bar)), style=DIM)
        lines.append(line)
        lines += [_directory(one) for one in tier.get("directories", []) if _is_unwell(one)]
    return lines


def _store(tier: dict[str, Any], rates: list[str]) -> Text:
    """The shared tier. The store does not say how much it has; it says whether it is there."""
    state = str(tier.get("breaker", {}).get("state"))
    line = Text(f"{SHARED:<7}{'-':>9}{'-':>11}{'-':>11}{rates[0]:>11}{rates[1]:>11}  ")
    line.append(STORE_STATES.get(state, state), style=GOOD if state == "closed" else BAD)
    line.append(f" {printable(str(tier.get('store')))}", style=DIM)
    return line


def _is_unwell(directory: dict[str, Any]) -> bool:
    return directory.get("state") != "ok" or directory.get("writing", "on") != "on"


def _directory(one: dict[str, Any]) -> Text:
    return Text(f"  {one.get('path')}: {one.get('state')}, writing {printable(str(one.get('writing')))}", style=BAD)


def _hits(history: RecentReadings, width: int) -> list[Text]:
    points = list(history.points)
    lines = [Text(f"{'HITS':<9}{'NOW':>6}{'ALL':>7}   BY TOKENS, ONE BAR FOR EACH INTERVAL", style=HEAD)]
    asked = sum(point.asked for point in points)
    tree = history.last.tree if history.last else {}
    tiers = [tier for tier in IntervalHits._fields if tier == "dram" or tier in tree.get("tiers", {})]
    for tier in tiers:
        now = points[-1].share(tier) if points else None
        share = sum(getattr(point, tier) for point in points) / asked if asked else None
        line = Text(f"{tier:<9}{_share(now):>6}{_share(share):>7}   ")
        line.append(sparkline([point.share(tier) for point in points], width - 25), style=GOOD)
        lines.append(line)
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _counts(history: RecentReadings) -> list[Text]:
    assert history.last is not None
    tree, change = history.last.tree, history.change

    def speed(path: str) -> str:
        return _short(change.rate(path)) if change else "-"

    latency = {str(name).lower(): row for name, row in tree.get("latency", {}).items()}
    p99 = latency.get("match", {}).get("p99_us")
    leases = {name.partition("_")[0]: value for name, value in tree.get("leases", {}).items()}
    nvme = tree.get("tiers", {}).get("nvme", {})
    below = f", nvme {speed('tiers.nvme.evicted_blocks')}" if nvme else ""
    rows = [
        f"per second: matches {speed('counters.match_requests')}; blocks stored {speed('counters.stored_blocks')}, "
        f"present {speed('counters.dedup_blocks')}, no room {speed('counters.refused_blocks')}",
        f"evicted per second: dram {speed('counters.evicted_blocks')}{below}; "
        f"match p99 {'-' if p99 is None else format_duration(p99 / 1e6)}; "
        f"slow requests {_short(at(tree, 'counters.requests_slow'))}",
        "leases: "
        + ", ".join(f"{name} {value}" for name, value in leases.items())
        + f"; pins {int(at(tree, 'pins.count'))}, {format_bytes(at(tree, 'pins.bytes'))}",
    ]
    if nvme:
        waiting = sum(int(one.get("queued", 0)) for one in nvme.get("directories", []))
        rows.append(
            f"queues: {_short(at(nvme, 'write_queue_blocks'))} blocks to write, "
            f"{format_bytes(at(nvme, 'write_in_flight_bytes'))} going down, "
            f"{format_bytes(at(nvme, 'promotion_in_flight_bytes'))} coming up, {_short(waiting)} disk requests"
        )
    if shared := tree.get("tiers", {}).get(SHARED):
        rows.append(
            f"shared store: look-ups per second {speed('tiers.shared.lookups')}, late "
            f"{speed('tiers.shared.lookups_late')}; {_short(at(shared, 'write_queue_blocks'))} blocks to send, "
            f"{format_bytes(at(shared, 'write_in_flight_bytes'))} going out; "
            f"bad blocks {_short(at(shared, 'bad_blocks'))}, flushes waiting {_short(at(shared, 'flushes_waiting'))}"
        )
    return [Text(row) for row in rows]


def _short(value: float) -> str:
    """A count in at most five characters."""
    for unit in ("", "k", "M"):
        if value < 9999.5:
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}G"


def _namespaces(history: RecentReadings, settings: ViewState) -> list[Text]:
    assert history.last is not None
    rows = history.last.tree.get("namespaces", [])
    speeds = history.rates("namespaces", ("id",), ("asked_blocks",))
    rates = {row["id"]: speed["asked_blocks"] for row, speed in zip(rows, speeds, strict=True) if speed is not None}
    order: dict[str, Callable[[dict[str, Any]], float]] = {
        "asked": lambda row: -rates.get(row["id"], 0.0),
        "hits": lambda row: -at(row, "hit_blocks") - at(row, "hit_below_blocks"),
        "blocks": lambda row: -at(row, "blocks") - at(row, "below_blocks"),
        "idle": lambda row: float("inf") if row.get("idle_s") is None else float(row["idle_s"]),
    }
    table: list[Row] = [("NAMESPACE", "ENGINE", "RANK", "DRAM", "NVME", "ASKED/S", "HIT%", "IDLE")]
    for row in sorted(rows, key=lambda row: (order[settings.sort](row), at(row, "id"))):
        asked, found = at(row, "asked_blocks"), at(row, "hit_blocks") + at(row, "hit_below_blocks")
        idle = row.get("idle_s")
        speed = rates.get(row["id"])
        table.append(
            (
                f"{row['id']} {str(row.get('fingerprint', ''))[:8]}",
                printable(str(row.get("engine", "")))[:18],
                str(row.get("rank", ""))[:14],
                f"{int(at(row, 'blocks')):,}",
                f"{int(at(row, 'below_blocks')):,}",
                "-" if speed is None else f"{speed:,.0f}",
                f"{found / asked:.0%}" if asked else "-",
                "-" if idle is None else format_duration(idle),
            )
        )
    marked = table[0][0] if settings.sort == "asked" else f"{table[0][0]} (by {settings.sort})"
    return _table([(marked, *table[0][1:]), *table[1:]], left=3)


def _quotas(history: RecentReadings) -> list[Text]:
    assert history.last is not None
    rows = history.last.tree.get("quotas", [])
    speeds = history.rates("quotas", ("name", "tier"), ("refused_blocks",))
    table: list[Row] = [("QUOTA", "TIER", "USED", "OF", "FULL", "NO ROOM/S")]
    for row, speed in zip(rows, speeds, strict=True):
        used, limit = at(row, "used_bytes"), at(row, "limit_bytes")
        table.append(
            (
                str(row.get("name", "")),
                str(row.get("tier", "")),
                format_bytes(used),
                format_bytes(limit),
                f"{used / limit:.0%}" if limit else "-",
                "-" if speed is None else _short(speed["refused_blocks"]),
            )
        )
    return _table([table[0], *sorted(table[1:])], left=2)


def _hot(history: RecentReadings) -> list[Text]:
    assert history.last is not None
    table: list[Row] = [("HOT PREFIX", "NAMESPACE", "BLOCKS", "TOKENS", "IN DRAM", "HITS")]
    table += [
        (
            str(row.get("name", ""))[:16],
            str(row.get("namespace", ""))[:8],
            f"{row.get('blocks', 0):,}",
            f"{row.get('tokens', 0):,}",
            f"{row.get('dram_blocks', 0):,}",
            f"{row.get('hits', 0):,.0f}",
        )
        for row in history.last.tree.get("hot_prefixes", [])
    ]
    return _table(table, left=2)


def _clients(history: RecentReadings) -> list[Text]:
    assert history.last is not None
    names = ("counters.loaded_bytes", "counters.stored_bytes")
    rows = history.last.tree.get("sessions", [])
    speeds_of = history.rates("sessions", ("pid", "name"), names, least_s=REPORT_S)
    table: list[Row] = [("CLIENT", "PID", "MEMORY", "LEASES", "LOADED/S", "STORED/S")]
    for row, speeds in zip(rows, speeds_of, strict=True):
        if row.get("pid") == os.getpid():
            continue  # this command itself
        memory = str(row.get("registration", "")) if row.get("mapped") else "messages"
        shown = ["-" if speeds is None else format_bytes(speeds[name]) for name in names]
        leases = int(at(row, "read_leases") + at(row, "write_leases"))
        table.append((printable(str(row.get("name", "")))[:24], str(row.get("pid", "")), memory, str(leases), *shown))
    return _table(table, left=1)


def _table(rows: list[Row], left: int) -> list[Text]:
    """Aligned rows, the first `left` columns to the left, the head in colour."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(Text("  ".join(cells).rstrip(), style=HEAD if number == 0 else ""))
    return lines
