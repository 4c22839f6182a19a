"""Promises of every eviction policy, or of the default one, checked on small workloads and on traces.

a  what was stored is found until a tenth of the arena's bytes has been stored after it, whatever the policy
b  dividing all times by 100 or 10,000 changes no hit rate by more than a point
c  the default policy is never more than a point behind `lru`, on traces and on small workloads
d  its mean share of the offline optimum's hits, at 1 to 5%, is at least 50% in DRAM and 68% in both tiers
e  it takes no more than 3 µs of CPU more than `lru` for a block that comes and goes, in blocks of 16 tokens, the mean
   of the traces; what it takes for each prompt counts more where blocks are longer (`bench_policies.py --speed`)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from policies import ALL

from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

DEFAULT = "hazard"
POINT = 0.01
LEAST_DRAM, LEAST_BOTH = 0.50, 0.68
MOST_US = 3.0
DIVISORS = (1.0, 100.0, 10_000.0)
ROOM = 400
"""Blocks of DRAM under the small workloads."""
BLOCK_BYTES = 1 << 20
PROMPT = 10
"""Blocks of each of their prompts."""

Prompts = Iterator[list[int]]


class Promise(NamedTuple):
    """One row: a promise and how far it is kept. `value` may be no more, or no less, than `bound`."""

    name: str
    what: str
    value: float
    bound: float
    least: bool = False

    @property
    def kept(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound


def prompt(number: int, blocks: int = PROMPT) -> list[int]:
    return [1000 * number + at for at in range(blocks)]


def store_then_load() -> Prompts:
    """Each prompt is loaded once, after two others have been stored, and never again."""
    for number in range(600):
        yield prompt(number)
        if number >= 2:
            yield prompt(number - 2)


def store_then_load_at_the_edge() -> Prompts:
    """Too few prompts to learn from, and room for five: the next one to be loaded is the second oldest."""
    for number in range(30):
        yield prompt(number, ROOM // 5)
        if number >= 7:
            yield prompt(number - 2, ROOM // 5)


def loop() -> Prompts:
    """A loop over one and a half times as much as there is room for."""
    for _ in range(15):
        for number in range(ROOM * 3 // 2 // PROMPT):
            yield prompt(number)


def scan_beside_hot() -> Prompts:
    """A hot set that takes half of the room, and twice as many prompts that are asked for once."""
    chance = random.Random(1)
    for number in range(1500):
        yield prompt(chance.randrange(ROOM // 2 // PROMPT)) if number % 3 == 0 else prompt(1000 + number)


def zipf() -> Prompts:
    """Some prompts are much more popular than others."""
    chance = random.Random(2)
    weights = [1.0 / (1 + rank) for rank in range(300)]
    for number in chance.choices(range(300), weights, k=3000):
        yield prompt(number)


def bursts() -> Prompts:
    """Eight prompts, each asked for four times, and then never again."""
    chance = random.Random(3)
    for burst in range(80):
        its = [8 * burst + number for number in range(8)] * 4
        chance.shuffle(its)
        yield from map(prompt, its)


def cold_start() -> Prompts:
    """The first minutes of continuing conversations."""
    chance, length = random.Random(4), [4] * 60
    for _ in range(250):
        chat = chance.randrange(60)
        length[chat] += 1
        yield prompt(chat, length[chat])


SMALL: tuple[Callable[[], Prompts], ...] = (
    store_then_load,
    store_then_load_at_the_edge,
    loop,
    scan_beside_hot,
    zipf,
    bursts,
    cold_start,
)


def small_rates(make: Callable[[], Prompts], policy: str, divisor: float, nvme: bool) -> tuple[float, float]:
    """Shares of the blocks asked for that were in DRAM, and in both tiers. Prompts are a second apart, divided."""
    sizes = Sizes(ROOM * BLOCK_BYTES, 5 * ROOM * BLOCK_BYTES * nvme, policy=policy)
    engine = Simulation(sizes, {1: plain_spec(16, BLOCK_BYTES)}, policies=ALL)
    asked = dram = both = 0
    for number, ids in enumerate(make()):
        found = engine.play(TraceRequest(number / divisor, chain_keys(ids), 0))
        asked += len(ids)
        dram += found.dram
        both += found.dram + found.nvme
    return dram / asked, both / asked


def lost_too_soon(policy: str, divisor: float) -> int:
    """Blocks that were not found, beside a hot set, though less than a tenth of the room had been stored after them."""
    sizes = Sizes(ROOM * BLOCK_BYTES, policy=policy)
    engine = Simulation(sizes, {1: plain_spec(16, BLOCK_BYTES)}, policies=ALL)
    latest = ROOM // 10 // PROMPT
    lost = 0
    for number in range(300):
        for hot in range(ROOM // PROMPT):
            if number % 10 == 0:
                engine.play(TraceRequest(number / divisor, chain_keys(prompt(hot)), 0))
        engine.play(TraceRequest(number / divisor, chain_keys(prompt(1000 + number)), 0))
        here = engine.resident(1)[0]
        for before in range(max(0, number - number % 10, number - latest + 1), number + 1):
            keys = chain_keys(prompt(1000 + before))
            lost += sum(keys[at : at + KEY_BYTES] not in here for at in range(0, len(keys), KEY_BYTES))
    return lost


def on_small_workloads() -> list[Promise]:
    """Promises a, b and c on the small workloads."""
    lost = max(lost_too_soon(policy, divisor) for policy in ALL for divisor in DIVISORS)
    rows = [Promise("a", "blocks of a tenth of the arena that were not found, any policy", lost, 0)]
    for make in SMALL:
        changed = behind = 0.0
        for nvme in (False, True):
            rates = [small_rates(make, DEFAULT, divisor, nvme) for divisor in DIVISORS]
            for its in rates:
                changed = max(changed, *(abs(one - first) for one, first in zip(its, rates[0], strict=True)))
            lru = small_rates(make, "lru", 1.0, nvme)
            # Hits in DRAM where it is all there is; with a tier below, those of both.
            tier = 1 if nvme else 0
            behind = max(behind, *(lru[tier] - its[tier] for its in rates))
        rows.append(Promise(f"b_{make.__name__}", f"{make.__name__}: changed by the pace", changed, POINT))
        rows.append(Promise(f"c_{make.__name__}", f"{make.__name__}: behind lru", behind, POINT))
    return rows


Rates = dict[tuple[str, float], tuple[float, float]]
"""Of DRAM and of both tiers, by trace and size."""


def on_traces(at_pace: dict[float, Rates], lru: Rates) -> list[Promise]:
    """Promises b and c: the rates of the default policy by divisor of the times, and those of lru."""
    first = at_pace[1.0]

    def worst(pairs: Iterator[tuple[float, str]]) -> tuple[float, str]:
        return max(pairs, default=(0.0, "no cell"))

    tiers = ("DRAM", "both")
    changed, where = worst(
        (abs(one - other), f"{trace} {percent:g}% {tier} / {divisor:g}")
        for divisor, rates in at_pace.items()
        for (trace, percent), its in rates.items()
        for tier, one, other in zip(tiers, its, first[trace, percent], strict=True)
    )
    behind, worst_cell = worst(
        (its - one, f"{trace} {percent:g}% {tier}")
        for rates in at_pace.values()
        for (trace, percent), ours in rates.items()
        if (trace, percent) in lru
        for tier, one, its in zip(tiers, ours, lru[trace, percent], strict=True)
    )
    return [
        Promise("b_traces", f"traces: changed by the pace ({where})", changed, POINT),
        Promise("c_traces", f"traces: behind lru ({worst_cell})", behind, POINT),
    ]


def of_means(dram: float, both: float) -> list[Promise]:
    """Promise d."""
    return [
        Promise("d_dram", "mean share of MIN's hits, DRAM", dram, LEAST_DRAM, least=True),
        Promise("d_both", "mean share of MIN's hits, DRAM and NVMe", both, LEAST_BOTH, least=True),
    ]


def of_cost(us: float) -> list[Promise]:
    """Promise e."""
    return [Promise("e", "µs of CPU for a block of 16 tokens that comes and goes, more than lru's", us, MOST_US)]
