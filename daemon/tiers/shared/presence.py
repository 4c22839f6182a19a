"""What this host believes to be in the store, each for a short time: claims of look-ups, and single blocks.

The store itself is the index of the tier. This is only memory of what it said, bounded in size and time.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES

CLAIM_S = 10.0
"""How long a found run is believed without asking again."""
NO_CLAIM_S = 1.0
"""How long it is believed that the store has nothing more of a prompt: another host may be storing it."""
KNOWN_S = 300.0
"""How long a block that this host stored or fetched counts as there, and is not sent again."""
UNFETCHABLE_S = 10.0
"""How long a block that was claimed and could not be fetched is not claimed again: else a client asks forever."""
REPLACE_S = 600.0
"""How long the next store of a block overwrites a value that proved to be another one: computing it may take minutes,
and a prompt that is asked for again and again would keep it there forever."""
MAX_CLAIMS = 4096
MAX_IN_WINDOWS = 262_144
"""Blocks of windows that all claims name together."""
MAX_BLOCKS = 131_072
MAX_UNFETCHABLE = 4096
MAX_BAD = 16_384
MAX_SAID = 65_536
"""Values that the store said it has, in look-ups of the last `CLAIM_S`."""

FORGOTTEN_AT_ONCE = 2
"""Of what is not believed any more, for each thing that is new."""

_KEY = struct.Struct(f"{KEY_BYTES}s")

PromptName = tuple[tuple[int, ...], int, bytes, bytes]
"""Numbers of the namespaces that were asked for; the length of the keys, the first and the last one.

The last key alone would do for chains, but a client may send keys that are not a chain.
"""


_Known = OrderedDict[tuple[int, bytes], tuple[float, int]]
"""By namespace number and key: until when it is believed, and the generation."""


class _Believed(NamedTuple):
    """A claim, until when it is believed, and how its namespaces stood when it was found: see `Presence._standing`."""

    claim: Claim
    until_s: float
    standing: list[tuple[int, int]]


class Presence:
    """Claims by prompt, values that the store said it has, blocks known to be there, and blocks that could not be
    fetched or are to be replaced.

    Each namespace has a *generation*, which begins again when its names have changed: what was found under an earlier
    one is not true any more.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._every = 0  # generations of all namespaces together
        self._generations: dict[int, int] = {}
        self._broken: dict[int, int] = {}  # how often a claimed block of a namespace could not be fetched
        self._claims: dict[PromptName, _Believed] = {}
        self._claimed_in_windows = 0
        self._blocks = _Known()
        self._unfetchable = _Known()
        self._bad = _Known()
        self._said = _Known()

    def generation(self, namespace: Namespace) -> int:
        """The present one of a namespace."""
        return self._every + self._generations.get(namespace.number, 0)

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Names have changed, of these namespaces or of all."""
        if numbers is None:
            self._every += 1
            self._claims.clear()
            self._claimed_in_windows = 0
            return
        for number in numbers:
            self._generations[number] = self._generations.get(number, 0) + 1

    # --- claims ----------------------------------------------------------------------------------

    def claim(self, namespaces: Sequence[Namespace], keys: bytes) -> Claim | None:
        """What the last look-up for this prompt found, if that is not long ago."""
        believed = self._claims.get(prompt_name(namespaces, keys))
        if believed is None or self._clock_s() >= believed.until_s:
            return None
        return believed.claim if believed.standing == self._standing(namespaces) else None

    def _standing(self, namespaces: Sequence[Namespace]) -> list[tuple[int, int]]:
        """What must not have changed since a claim was found. Another tenant's failures leave it alone."""
        return [(self.generation(one), self._broken.get(one.number, 0)) for one in namespaces]

    def claimed(
        self, namespaces: Sequence[Namespace], keys: bytes, found: Claim, known: Sequence[set[bytes]] = ()
    ) -> None:
        """A look-up has ended, and `found` this under the names of now: believe it, up to what cannot be fetched.

        `known`: what `unfetchable` said when it began, which it has left out.
        """
        name, until_s = prompt_name(namespaces, keys), self._clock_s()
        self._drop_claim(name)
        end = self._fetchable(namespaces, keys, found, known)
        if end < found.end and found.stored:
            return  # other blocks of the windows would be needed there: the next look-up finds an end that is whole
        claim = found._replace(end=end)
        more = any(claim.end > start for start in claim.starts.values()) or any(claim.stored.values())
        until_s += CLAIM_S if more else NO_CLAIM_S
        self._claims[name] = _Believed(claim, until_s, self._standing(namespaces))
        self._claimed_in_windows += claim.blocks_in_windows
        while len(self._claims) > MAX_CLAIMS or (self._claimed_in_windows > MAX_IN_WINDOWS and len(self._claims) > 1):
            self._drop_claim(next(iter(self._claims)))

    def _drop_claim(self, name: PromptName) -> None:
        believed = self._claims.pop(name, None)
        if believed is not None:
            self._claimed_in_windows -= believed.claim.blocks_in_windows

    def _fetchable(
        self, namespaces: Sequence[Namespace], keys: bytes, claim: Claim, known: Sequence[set[bytes]]
    ) -> int:
        """Where the run ends at the latest: at the first block that could not be fetched a short time ago."""
        end, starts, stored = claim.end, claim.starts, claim.stored
        bad = self.unfetchable(namespaces)
        bad = [bad_keys - was for bad_keys, was in zip(bad, known, strict=True)] if known else bad
        # One pass over the keys, however many namespaces: prompts are long.
        keys_of_any = set().union(*bad)
        first = 0 if stored else min(starts.values(), default=end)
        run = keys[first * KEY_BYTES : end * KEY_BYTES] if keys_of_any else b""
        if keys_of_any.isdisjoint(chain.from_iterable(_KEY.iter_unpack(run))):
            return end
        for number, (key,) in enumerate(_KEY.iter_unpack(run), first):
            if key in keys_of_any and any(
                key in bad_keys and (number in stored[place] if place in stored else number >= starts.get(place, end))
                for place, bad_keys in enumerate(bad)
            ):
                return number
        return end

    def unfetchable(self, namespaces: Sequence[Namespace]) -> list[set[bytes]]:
        """For each of these, the blocks that could not be fetched a short time ago."""
        self._forget_old_failures()
        bad: dict[int, set[bytes]] = {one.number: set() for one in namespaces}
        generations = {one.number: self.generation(one) for one in namespaces}
        for (number, key), (_, generation) in self._unfetchable.items():
            if generations.get(number) == generation:
                bad[number].add(key)
        return [bad[one.number] for one in namespaces]

    def _forget_old_failures(self) -> None:
        now_s = self._clock_s()
        while self._unfetchable:
            oldest = next(iter(self._unfetchable))
            if self._unfetchable[oldest][0] > now_s:
                return
            del self._unfetchable[oldest]

    def said(self, values: Iterable[tuple[Namespace, bytes]]) -> None:
        """A look-up under the names of now was told that these values are there; each by the key that names it."""
        for namespace, key in values:
            self._put(self._said, MAX_SAID, namespace, key, CLAIM_S)

    def breaks_word(self, namespace: Namespace, key: bytes, name_key: bytes, generation: int) -> bool:
        """True if the store said a short time ago that it has the value with this block, which it does not deliver.

        Once for each value: then the block counts as one that cannot be fetched. `generation` as in `note`.
        """
        if generation != self.generation(namespace):
            return False
        said = self._holds(self._said, namespace, name_key)
        self._said.pop((namespace.number, name_key), None)
        return said and not self._holds(self._unfetchable, namespace, key)

    def drop_claims(self) -> None:
        """The store went away, or came back: look again before anything is promised."""
        self._claims.clear()
        self._claimed_in_windows = 0

    # --- blocks ----------------------------------------------------------------------------------

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """True if the store had this block when this host last stored or fetched it, not long ago."""
        return self._holds(self._blocks, namespace, key)

    def note(self, namespace: Namespace, key: bytes, generation: int) -> None:
        """The store has this block, as a job found that began in this `generation`."""
        if generation == self.generation(namespace):
            self._unfetchable.pop((namespace.number, key), None)
            self._bad.pop((namespace.number, key), None)
            self._put(self._blocks, MAX_BLOCKS, namespace, key, KNOWN_S)

    def could_not_fetch(self, namespace: Namespace, key: bytes, generation: int, bad: bool = False) -> None:
        """The store claimed this block, and did not deliver it; `generation` as in `note`.

        `bad`: what it delivered is another value, which has to be replaced.
        """
        if generation == self.generation(namespace):
            self._blocks.pop((namespace.number, key), None)
            self._put(self._unfetchable, MAX_UNFETCHABLE, namespace, key, UNFETCHABLE_S)
            if bad:
                self._put(self._bad, MAX_BAD, namespace, key, REPLACE_S)
            self._broken[namespace.number] = self._broken.get(namespace.number, 0) + 1

    def is_to_replace(self, namespace: Namespace, key: bytes) -> bool:
        """True if a store of this block overwrites what is there."""
        return any(self._holds(where, namespace, key) for where in (self._bad, self._unfetchable))

    def check_integrity(self) -> list[str]:
        """Every way in which the claims and their count disagree."""
        blocks = sum(believed.claim.blocks_in_windows for believed in self._claims.values())
        counted = self._claimed_in_windows
        return [] if blocks == counted else [f"shared claims: {blocks} blocks in windows, not {counted}"]

    def _put(self, where: _Known, most: int, of: Namespace, key: bytes, seconds: float) -> None:
        name, now_s = (of.number, key), self._clock_s()
        if where.pop(name, None) is None and len(where) >= most:
            where.popitem(last=False)  # of a plain dict this gets slower with each one that went before
        for _ in range(FORGOTTEN_AT_ONCE):  # else each would grow to the most that it may have, and stay there
            if not where or next(iter(where.values()))[0] > now_s:
                break
            where.popitem(last=False)
        where[name] = now_s + seconds, self.generation(of)

    def _holds(self, where: _Known, namespace: Namespace, key: bytes) -> bool:
        until_s, generation = where.get((namespace.number, key), (0.0, -1))
        return generation == self.generation(namespace) and self._clock_s() < until_s


def prompt_name(namespaces: Sequence[Namespace], keys: bytes) -> PromptName:
    """What stands for a prompt in a dictionary."""
    return tuple(one.number for one in namespaces), len(keys), keys[:KEY_BYTES], keys[-KEY_BYTES:]
