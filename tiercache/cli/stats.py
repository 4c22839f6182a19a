"""`tiercache stats`: the daemon's statistics, all or some sections, once or line by line."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import Address, Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.readings import Reading, quiet_client, take_reading
from tiercache.cli.report import Section, human, print_json, print_sections, sections, with_human
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration

SUMMARY = "summary"
_WHAT_IF = "what_if"
MIN_INTERVAL_S = 0.01
_NUMBER = re.compile(r"[+-]?\d*\.?\d+")
HEADER_EVERY = 20
"""Lines of --watch between two headers."""

_RATES = {
    "matches": "match_requests",
    "asked": "match_blocks_asked",
    "hit": "match_blocks_hit",  # in DRAM; blocks below are added to it
    "stored": "stored_blocks",
    "dedup": "dedup_blocks",
    "evicted": "evicted_blocks",
}
"""Columns of --watch per second -> the counter behind each."""

_COLUMNS = ("time", "hit%", *(f"{name}/s" for name in _RATES), "blocks", "used", "sessions", "match p99")
_WIDTHS = (8, 5, 9, 9, 9, 9, 9, 9, 9, 10, 8, 9)
_FIRST_TO_GO = ("dedup/s", "sessions", "matches/s", "blocks")
"""Columns of --watch left out on a narrow terminal."""


@command(
    "stats",
    """\
  tiercache stats                     everything, as tables
  tiercache stats tiers namespaces    these sections alone
  tiercache stats --watch 5           one line every 5 seconds, with what changed
  tiercache stats --json | jq .arena.used_bytes
""",
)
def stats(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION]...|SECONDS", help="Sections to show (default: all); or --watch's interval."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="One line per interval, until Ctrl-C.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Show what the daemon holds, how often it is asked and how fast it answers.

    With --watch, rates are per second, and lines that begin with # say that the daemon is gone, or back.
    """
    wanted, interval_s = told(what or [], watch=watch)
    if interval_s is not None:
        return _watch(address, interval_s=interval_s, as_json=as_json)
    return show(address, wanted=wanted, as_json=as_json)


def told(arguments: Sequence[str], *, watch: bool) -> tuple[Sequence[str], float | None]:
    """Sections to show, or the interval of --watch in seconds. Raises ConfigError for both at once."""
    if not watch and not (len(arguments) == 1 and _NUMBER.fullmatch(arguments[0])):
        return arguments, None
    if not arguments:
        return (), 1.0
    if len(arguments) > 1 or not _NUMBER.fullmatch(arguments[0]) or float(arguments[0]) < MIN_INTERVAL_S:
        text = f"--watch takes one interval in SECONDS, at least {MIN_INTERVAL_S:g}, and shows no sections"
        raise ConfigError(f"{' '.join(arguments)}: {text}")
    return (), float(arguments[0])


def show(address: str | None, *, wanted: Sequence[str] = (), as_json: bool) -> int:
    """Print everything once, or the `wanted` sections. Raises ConfigError for one that does not exist."""
    with connected(address) as client:
        tree = client.stats()
    _check(wanted, tree)
    if as_json:
        print_json(with_human({name: tree[name] for name in wanted if name in tree} if wanted else tree))
        return EXIT_OK
    found = [summary(tree)] if SUMMARY in wanted or not wanted else []
    if _WHAT_IF in wanted or not wanted:
        estimate = what_if_table(tree)
        if not estimate and wanted:
            estimate = [Section("what if", ("", ""), [("what if", what_if_sentence(tree))])]
        found += estimate
    found += sections(
        {name: branch for name, branch in tree.items() if name != _WHAT_IF and (name in wanted or not wanted)}
    )
    print_sections(found)
    return EXIT_OK


def _check(wanted: Sequence[str], tree: dict[str, Any]) -> None:
    """Raises ConfigError for the first name that is not a section."""
    for name in wanted:
        if name not in (SUMMARY, *tree):
            raise ConfigError(f"{name}: is not a section: there are {', '.join((SUMMARY, *tree))}")


def summary(tree: dict[str, Any]) -> Section:
    """The few most important figures."""
    arena, counters = tree.get("arena", {}), tree.get("counters", {})
    asked, below = counters.get("match_blocks_asked", 0), counters.get("match_blocks_below", 0)
    shared, hit = counters.get("match_blocks_shared", 0), counters.get("match_blocks_hit", 0) + below
    used, size = arena.get("used_bytes", 0), arena.get("bytes", 0)
    hit_rate = "nothing asked for yet"
    if asked:
        parts = {"NVMe": below - shared, "the shared store": shared}
        each = "".join(f", {part / asked:.1%} from {name}" for name, part in parts.items() if part)
        hit_rate = f"{hit / asked:.1%} of {asked:,} blocks asked for{each}"
    share = f" ({used / size:.0%})" if size else ""
    health = tree.get("health", {})
    rows = [
        ("health", ": ".join([str(health.get("state", "unknown")), *map(str, health.get("reasons", []))])),
        ("hit rate", hit_rate),
        ("arena", f"{format_bytes(used)} of {format_bytes(size)} used{share}"),
        ("blocks", human("blocks", total_blocks(tree))),
        ("sessions", human("sessions", len(tree.get("sessions", [])))),
        ("up for", human("uptime_s", tree.get("daemon", {}).get("uptime_s", 0))),
        ("what if", what_if_sentence(tree)),
    ]
    return Section("summary", ("", ""), rows)


def total_blocks(tree: dict[str, Any]) -> int:
    """Blocks held, over all tiers."""
    return sum(int(tier.get("blocks", 0)) for tier in tree.get("tiers", {}).values())


def match_latency(tree: dict[str, Any]) -> dict[str, Any]:
    """Percentiles of the requests that engines wait for; empty before the first one."""
    latency = {str(name).lower(): figures for name, figures in tree.get("latency", {}).items()}
    return dict(latency.get("match", {}))


def _watch(address: str | None, *, interval_s: float, as_json: bool) -> int:
    """Print a line per interval with what changed, until Ctrl-C or SIGTERM.

    One line says that the daemon is gone, and one that it is back; the numbers continue from there.
    """
    stop = threading.Event()
    # Not KeyboardInterrupt: Python silently drops one that is raised while an object is being freed.
    earlier = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with quiet_client(), connected(address) as client:
            lines = _Lines(as_json)
            before = Reading(time.monotonic(), client.stats())
            read_s = before.time_s
            while not stop.wait(max(0.0, read_s + interval_s - time.monotonic())):
                now = take_reading(client)
                lines.print(before, now)
                read_s, before = now.time_s, before._replace(problem=now.problem) if now.problem else now
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return EXIT_OK


class _Lines:
    """The output of --watch, one line for each reading."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._printed = 0
        self._places = shown_columns(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)

    def print(self, before: Reading, now: Reading) -> None:
        """The changes between two readings; a single line while a daemon is gone."""
        if now.problem:
            if not before.problem:
                self._say("gone", f"the daemon is gone, waiting for it: {now.problem}")
            return
        if before.problem:
            state = "restarted" if now.generation != before.generation else "answers again"
            self._say("back", f"the daemon is back ({state})")
        row = changes(before.tree, now.tree, now.time_s - before.time_s)
        if self._as_json:
            print_json(with_human(row), indent=None)
            return
        if self._printed % HEADER_EVERY == 0:
            print(self._line(_COLUMNS))
        self._printed += 1
        print(self._line(cells(row)), flush=True)

    def _line(self, row: tuple[str, ...]) -> str:
        return " ".join(row[place].rjust(_WIDTHS[place]) for place in self._places)

    def _say(self, event: str, text: str) -> None:
        if self._as_json:
            print_json({"unix_s": round(time.time(), 3), "event": event, "text": text}, indent=None)
        else:
            print(f"# {time.strftime('%H:%M:%S')} {text}", flush=True)


def shown_columns(width: int | None) -> list[int]:
    """Indexes of the columns of --watch that fit a terminal of `width` characters; all if None."""
    places = list(range(len(_COLUMNS)))
    for name in _FIRST_TO_GO:
        if width is not None and sum(_WIDTHS[place] + 1 for place in places) - 1 > width:
            places.remove(_COLUMNS.index(name))
    return places


def changes(before: dict[str, Any], now: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The changes between two trees read `seconds` apart; rates are per second.

    A daemon that restarted in between counts from zero again, and so do the rates.
    """
    same_life = before.get("daemon", {}).get("generation") == now.get("daemon", {}).get("generation")
    earlier = before.get("counters", {}) if same_life else {}
    later = now.get("counters", {})
    grown = {name: int(later.get(name, 0)) - int(earlier.get(name, 0)) for name in _RATES.values()}
    asked = grown["match_blocks_asked"]
    grown["match_blocks_hit"] += int(later.get("match_blocks_below", 0)) - int(earlier.get("match_blocks_below", 0))
    return {
        "unix_s": round(time.time(), 3),
        "interval_s": round(seconds, 3),
        "hit_rate": round(grown["match_blocks_hit"] / asked, 4) if asked else None,
        **{f"{name}_per_s": round(grown[counter] / seconds, 1) for name, counter in _RATES.items()},
        "blocks": total_blocks(now),
        "used_bytes": now.get("arena", {}).get("used_bytes", 0),
        "sessions": len(now.get("sessions", [])),
        "match_p99_us": match_latency(now).get("p99_us"),
        "restarted": not same_life,
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of `changes` as the cells of a line."""
    clock = time.strftime("%H:%M:%S", time.localtime(row["unix_s"]))
    hit_rate = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}".rstrip("%")
    rates = [f"{value:,.0f}" for name, value in row.items() if name.endswith("_per_s")]
    state = [human(name, row[name]) for name in ("blocks", "used_bytes", "sessions", "match_p99_us")]
    return (clock, hit_rate, *rates, *state)


# --- what if: the daemon's estimate for caches of other sizes ------------------------------------------


class CurvePoint(NamedTuple):
    """A cache size, its composition, and the share of looked-up blocks that it would have had."""

    size_bytes: int
    label: str
    hit_rate: float


def what_if_points(tree: dict[str, Any]) -> list[CurvePoint]:
    """The curve with names for its sizes; empty if there is none (yet)."""
    dram_bytes = int(tree.get("arena", {}).get("bytes", 0))
    curve = tree.get("what_if", {}).get("curve", [])
    below_bytes = int(tree.get("tiers", {}).get("nvme", {}).get("capacity_bytes", 0))
    if not dram_bytes:
        return []
    return [
        CurvePoint(
            int(one["capacity_bytes"]), _label(int(one["capacity_bytes"]), dram_bytes, below_bytes), one["hit_rate"]
        )
        for one in curve
    ]


def _label(size_bytes: int, dram_bytes: int, below_bytes: int) -> str:
    for times in (Fraction(1, 2), Fraction(1), Fraction(2)):
        if below_bytes and abs(size_bytes - dram_bytes - below_bytes * times) < 1:
            return "DRAM + NVMe" if times == 1 else f"DRAM + {times} NVMe"
    times = Fraction(size_bytes, dram_bytes).limit_denominator(8)
    return "DRAM" if times == 1 else f"{times} DRAM"


def what_if_sentence(tree: dict[str, Any]) -> str:
    """The gain from more memory, in one line."""
    what_if = tree.get("what_if")
    if not what_if:
        return "off (--what-if no)"
    by_label = {point.label: point for point in what_if_points(tree)}
    if "DRAM" not in by_label or "2 DRAM" not in by_label:
        return "not enough has been looked up yet to say what more memory would bring"
    now, twice = by_label["DRAM"], by_label["2 DRAM"]
    text = f"twice the DRAM ({format_bytes(twice.size_bytes)}) would have had {twice.hit_rate:.1%} of the blocks"
    text += f" looked up in the last {format_duration(what_if['window_s'])}, and this much {now.hit_rate:.1%}"
    if "DRAM + NVMe" in by_label and "DRAM + 2 NVMe" in by_label:
        both, more = by_label["DRAM + NVMe"], by_label["DRAM + 2 NVMe"]
        text += f"; with the NVMe {both.hit_rate:.1%}, with twice the NVMe {more.hit_rate:.1%}"
    return text


def what_if_table(tree: dict[str, Any]) -> list[Section]:
    """The curve as a section; no section without a curve."""
    rows = [(format_bytes(point.size_bytes), point.label, f"{point.hit_rate:.1%}") for point in what_if_points(tree)]
    columns = ("capacity", "as large as", "hit rate")
    return [Section("what if (LRU caches of other sizes)", columns, rows)] if rows else []
