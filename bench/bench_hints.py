"""What hints of clients would give: a trace played with hints that know its future, wholly or roughly.

    TIERCACHE_TRACES=traces .venv/bin/python bench/bench_hints.py --only mix --percent 2 --policy lru

After each prompt its client says what comes: `done` when no later prompt goes on from its last full block, else
`return_in_s`, the time until one does. `rough` times are off by a factor exp(N(0, 0.5)), and one in ten of both kinds
says nothing. `ahead` counts the blocks that were brought up before a client came back, `reads` all that were read from
NVMe into DRAM; both as shares of the blocks asked for. Sizes and headroom as in `bench_policies.py`.

`predicted` has no hints: every second what NVMe has alone is brought up, the chains of the greatest worth first, as
long as `hazard` thinks them worth `--margin` times what DRAM would give up for them. The daemon does not do that.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench_policies import BLOCK_BYTES, NVME_TIMES, name_of, open_trace
from common import SEED, Report
from traces import trace_files

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.played import Played, play
from tiercache.replay.requests import RequestKind, Told, TraceRequest
from tiercache.replay.simulation import Outcome, Simulation, Sizes

MODES = ("none", "done", "return", "both", "rough", "both, not ahead", "predicted")
SILENT = 0.1
SPREAD = 0.5


class Known(NamedTuple):
    """A trace in memory. For each prompt: the time until a later prompt continues it; 0 for never."""

    name: str
    requests: list[TraceRequest]
    returns_s: list[float]
    unique_blocks: int
    asked_blocks: int
    longest: int


def known(path: Path, most: int) -> Known:
    requests = [request for request in open_trace(path) if request.keys][:most]
    later: dict[bytes, float] = {}
    returns_s = []
    for request in reversed(requests):
        keys = [request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)]
        returns_s.append(later[keys[-1]] - request.time_s if keys[-1] in later else 0.0)
        later.update(dict.fromkeys(keys, request.time_s))
    asked = sum(request.blocks for request in requests)
    longest = max(request.blocks for request in requests)
    return Known(name_of(path), requests, returns_s[::-1], len(later), asked, longest)


class Hinted:
    """The prompts of a trace, each followed by its hint."""

    def __init__(self, trace: Known, mode: str) -> None:
        self._trace = trace
        self._mode = mode
        self.specs = open_trace_specs()

    def __iter__(self) -> Iterator[TraceRequest]:
        chance = random.Random(SEED)
        for request, return_s in zip(self._trace.requests, self._trace.returns_s, strict=True):
            yield request
            off, silent = math.exp(chance.gauss(0.0, SPREAD)), chance.random() < SILENT
            if self._mode == "rough":
                return_s *= off
            if self._mode in ("none", "predicted") or (self._mode == "rough" and silent):
                continue
            if return_s and self._mode != "done":
                yield request._replace(kind=RequestKind.HINT, told=Told(return_in_s=max(0.001, return_s)))
            elif not return_s and self._mode != "return":
                yield request._replace(kind=RequestKind.HINT, told=Told(done=True))


def open_trace_specs() -> dict[int, object]:
    from tiercache.replay.requests import plain_spec

    return {1: plain_spec(512, BLOCK_BYTES)}


class Predicting(Simulation):
    """Promotes from NVMe what `hazard` expects to be used soon."""

    every_s = 1.0
    at_once = 4
    margin = 1.0
    next_s = -math.inf

    def play(self, request: TraceRequest) -> Outcome:
        if request.time_s >= self.next_s:
            self.now_s = max(self.now_s, request.time_s)
            self.next_s = self.now_s + self.every_s
            self._bring_up()
        return super().play(request)

    def _bring_up(self) -> None:
        namespace = self._namespaces[1]
        dram, nvme = namespace.table, self._shelf.table(namespace)
        index, hazard = self._shelf.index, nvme.policy.inner
        done = 0
        for cell in heapq.nlargest(64, hazard._rings.heads, key=hazard._worth_of):
            worth, victim = hazard._worth_of(cell), dram.policy.victim()
            if victim == NO_ENTRY or worth <= self.margin * dram.policy.worth(victim) or done == self.at_once:
                return
            first = entry = hazard._rings.heads[cell]
            while True:
                if dram.get(index.key[entry]) == NO_ENTRY and done < self.at_once:
                    done += 1
                    keys = b"".join(chain_to(index, entry))
                    self.cache.ahead.blocks += finish(self.cache.reads.bring_ahead([namespace], keys, lambda: 1 << 30))
                    self._settle()
                after = index.columns.next[entry] - 1
                if after in (first, NO_ENTRY) or done == self.at_once:
                    break
                entry = after


def chain_to(index: Index, entry: int) -> list[bytes]:
    keys = []
    while index.parent[entry] != NO_ENTRY:
        keys.append(index.key[entry])
        entry = index.parent[entry]
    return keys[::-1]


def measure(trace: Known, percent: float, policy: str, mode: str) -> tuple[Played, int]:
    """One replay, and how many blocks it promoted ahead of their use."""
    blocks = max(1, round(trace.unique_blocks * percent / 100))
    headroom_bytes = trace.longest * BLOCK_BYTES
    sizes = Sizes(
        blocks * BLOCK_BYTES + headroom_bytes,
        blocks * NVME_TIMES * BLOCK_BYTES,
        policy=policy,
        headroom_bytes=headroom_bytes,
    )
    engine = (Predicting if mode == "predicted" else Simulation)(sizes, {}, trace.requests[0].time_s)
    if mode == "both, not ahead":
        engine.cache.ahead.say = lambda *arguments: None  # type: ignore[method-assign]
    played = play(Hinted(trace, mode), sizes, engine=engine)  # type: ignore[arg-type]
    assert engine.check_integrity() == []
    return played, engine.cache.ahead.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=["lru", "hazard"], help="default: both")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--percent", type=float, action="append", help="sizes of DRAM, default: 2")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all")
    parser.add_argument("--margin", type=float, default=1.0, help="of `predicted`, default: 1")
    parser.add_argument("--requests", type=int, default=1 << 30, help="of each trace, the first so many")
    options = parser.parse_args()
    Predicting.margin = options.margin
    report = Report("hints")
    paths = [path for path in trace_files() if options.only in path.name]
    if not paths:
        sys.exit(f"no trace in TIERCACHE_TRACES has {options.only!r} in its name")
    for path in paths:
        trace = known(path, options.requests)
        print(
            f"\n{trace.name}: {len(trace.requests)} prompts, {sum(map(bool, trace.returns_s))} of them gone on from;"
            f" {trace.asked_blocks} blocks, {trace.unique_blocks} different ones"
        )
        print(f"{'size':>5} {'policy':8} {'hints':16} {'DRAM %':>7} {'both %':>7} {'ahead %':>8} {'reads %':>8}")
        for percent in options.percent or [2.0]:
            for policy in options.policy or ["lru", "hazard"]:
                for mode in options.mode or MODES:
                    if mode == "predicted" and policy != "hazard":
                        continue
                    played, ahead = measure(trace, percent, policy, mode)
                    row = [
                        100 * played.block_rate("dram"),
                        100 * played.block_rate("dram", "nvme"),
                        100 * ahead / trace.asked_blocks,
                        100 * played.tallies.promoted / trace.asked_blocks,
                    ]
                    print(f"{percent:4g}% {policy:8} {mode:16} {row[0]:7.2f} {row[1]:7.2f} {row[2]:8.2f} {row[3]:8.2f}")
                    sys.stdout.flush()
                    for name, value in zip(("dram", "both", "ahead", "reads"), row, strict=True):
                        key = f"{name}_{trace.name}_{percent:g}_{policy}_{mode.replace(', ', '_').replace(' ', '_')}"
                        report.add(key, f"{trace.name}, {percent:g}%, {policy}, {mode}: {name}", value, "%")
    report.note(f"seed {SEED}; NVMe {NVME_TIMES} times DRAM")
    report.finish()


if __name__ == "__main__":
    main()
