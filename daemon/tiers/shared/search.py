"""The search for the longest stored run of a prompt: which blocks to probe, without a store.

    hosts' tiers  |=========>                         |          the local run ends at `start`
    probes                  ..   .   .   .   x   .               the first block, and 32 more at once; the first missing
                                                                 one bounds the next round
                                     |.......|                   between the last present and the first missing one
    sample                 . . . . . |                           some of what is claimed, with the last round

The search takes the stored blocks of a chain for a prefix. A store that evicts as it likes may leave holes; the sample
finds wide ones, and the fetch finds the rest. So the outcome is a claim: only a proved fetch is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

PROBES = 32
"""Places probed in one round: three rounds are enough for 32,768 blocks."""
MAX_PROBES = 1024
"""Probes in one round, for all namespaces together."""
SAMPLED = 32
"""Places of what is claimed that are probed with the last round."""
WINDOW_ROUNDS = 4
"""How often a cut may be shortened because a window before it is not complete."""

Probe = tuple[int, int]
"""Index of a namespace, and the number of a block, or of a pack of blocks."""


class ChainAsk(NamedTuple):
    """A namespace that needs the whole prefix. The first `start` blocks are on this host."""

    start: int


class WindowAsk(NamedTuple):
    """A namespace that needs `window` blocks before a cut. `here[n]` is not 0 where this host has block n."""

    window: int
    here: bytes


Rounds = Generator[list[Probe], list[bool], "StoredRun"]
"""Yields probes, is sent whether each is stored, and returns the run."""


class StoredRun(NamedTuple):
    """All namespaces together have, or are claimed to have, blocks 0 ..< `end`.

    `stored`: by namespace with a window, those of its blocks that the store has.
    """

    end: int
    stored: dict[int, set[int]]


def longest_run(asks: Sequence[ChainAsk | WindowAsk], blocks: int, pack: int = 1) -> Rounds:
    """The search over a prompt of `blocks`. `pack`: blocks of a chain in one value, which are probed as one."""
    chains = {place: ask for place, ask in enumerate(asks) if isinstance(ask, ChainAsk)}
    windows = {place: ask for place, ask in enumerate(asks) if isinstance(ask, WindowAsk)}
    least = min((ask.start for ask in chains.values()), default=0)
    end = (yield from _chain_end(chains, blocks, pack, least)) if chains else blocks
    return (yield from _whole_windows(windows, end))


def _chain_end(
    chains: dict[int, ChainAsk], blocks: int, pack: int, least: int
) -> Generator[list[Probe], list[bool], int]:
    low, high = least // pack, blocks // pack
    first = low

    def needed(number: int) -> list[Probe]:
        return [(place, number) for place, ask in chains.items() if ask.start < (number + 1) * pack]

    fan = max(2, min(PROBES, MAX_PROBES // (2 * len(chains))))
    while low < high:
        numbers, sample = _spread(low, high, fan), list[int]()
        if low == first < numbers[0]:  # of what is fetched first, the store should have said that it is there
            numbers = [low, *_spread(low + 1, high, fan)]
        if high - low <= fan:  # the last round looks for holes too: no round trip more
            sample = _spread(first, low, min(SAMPLED, fan))
        missing = yield from _first_missing([*sample, *numbers], needed)
        if missing is None:
            low = high
        elif missing < low:
            low = high = missing
        else:
            at = numbers.index(missing)
            low, high = numbers[at - 1] + 1 if at else low, missing
    return max(least, low * pack)


def _spread(low: int, high: int, most: int) -> list[int]:
    """At most that many numbers of `low ..< high`, evenly spread, the last one included."""
    count = min(most, high - low)
    return [low + (place + 1) * (high - low) // count - 1 for place in range(count)]


def _first_missing(
    numbers: Sequence[int], needed: Callable[[int], list[Probe]]
) -> Generator[list[Probe], list[bool], int | None]:
    probes: list[Probe] = [probe for number in numbers for probe in needed(number)]
    there = yield probes
    return next((number for (_, number), here in zip(probes, there, strict=True) if not here), None)


def _whole_windows(windows: dict[int, WindowAsk], end: int) -> Generator[list[Probe], list[bool], StoredRun]:
    stored: dict[int, set[int]] = {place: set() for place in windows}
    asked: dict[int, set[int]] = {place: set() for place in windows}
    for _ in range(WINDOW_ROUNDS if windows else 0):
        probes: list[Probe] = []
        for place, ask in windows.items():
            wanted = [number for number in range(max(0, end - ask.window), end) if not ask.here[number]]
            probes += [(place, number) for number in wanted if number not in asked[place]]
        if len(probes) > MAX_PROBES:
            return StoredRun(0, {})
        if probes:
            there = yield probes
            for (place, number), here in zip(probes, there, strict=True):
                asked[place].add(number)
                if here:
                    stored[place].add(number)
        missing = [number for place, ask in windows.items() for number in _gaps(ask, stored[place], end)]
        if not missing:
            return StoredRun(end, stored)
        # A missing block rules out every cut from the next block to the window's length behind it. The cut may well be
        # shorter than the chains that are on this host: their windows need not be here.
        end = min(missing)
        if not end:
            break
    return StoredRun(end, stored) if not windows else StoredRun(0, {})


def _gaps(ask: WindowAsk, stored: set[int], end: int) -> list[int]:
    numbers = range(max(0, end - ask.window), end)
    return [number for number in numbers if not ask.here[number] and number not in stored]
