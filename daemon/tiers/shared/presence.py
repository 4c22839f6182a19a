"""What this host believes to be in the store, each for a short time: claims of look-ups, and single blocks.

The store itself is the index of the tier. This is only memory of what it said, bounded in size and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tier import Claim
from tiercache.protocol.messages import KEY_BYTES

CLAIM_S = 10.0
"""How long a found run is believed without asking again."""
NO_CLAIM_S = 1.0
"""How long it is believed that the store has nothing more of a prompt: another host may be storing it."""
KNOWN_S = 300.0
"""How long a block that this host stored or fetched counts as there, and is not sent again."""
UNFETCHABLE_S = 10.0
"""How long a block that was claimed and could not be fetched is not claimed again: else a client asks for ever."""
MAX_CLAIMS = 4096
MAX_IN_WINDOWS = 262_144
"""Blocks of windows that all claims name together."""
MAX_BLOCKS = 131_072
MAX_UNFETCHABLE = 4096

PromptName = tuple[tuple[int, ...], int, bytes, bytes]
"""Numbers of the namespaces that were asked for; the length of the keys, the first and the last one.

The last key alone would do for chains, but a client may send keys that are no chain.
"""


class Presence:
    """Claims by prompt, blocks known to be in the store, and blocks that could not be fetched.

    Each namespace has a *generation*, which begins anew when its names have changed: what was found under an earlier
    one is not true any more.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._every = 0  # generations of all namespaces together
        self._generations: dict[int, int] = {}
        self._claims: dict[PromptName, tuple[Claim, tuple[int, ...]]] = {}
        self._claimed_in_windows = 0
        self._blocks: dict[tuple[int, bytes], tuple[float, int]] = {}
        self._unfetchable: dict[tuple[int, bytes], tuple[float, int]] = {}

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
        claim, generations = self._claims.get(prompt_name(namespaces, keys), (None, ()))
        if claim is None or self._clock_s() >= claim.until_s:
            return None
        return claim if generations == tuple(map(self.generation, namespaces)) else None

    def claimed(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        end: int,
        starts: dict[int, int],
        stored: dict[int, set[int]],
    ) -> None:
        """A look-up has ended, under the names of now: all have, or can fetch, blocks 0 ..< `end`."""
        generations = tuple(map(self.generation, namespaces))
        end = self._fetchable(namespaces, keys, end, starts, stored)
        more = any(end > start for start in starts.values()) or any(stored.values())
        name, until_s = prompt_name(namespaces, keys), self._clock_s() + (CLAIM_S if more else NO_CLAIM_S)
        self._drop_claim(name)
        self._claims[name] = Claim(end, starts, stored, until_s), generations
        self._claimed_in_windows += sum(map(len, stored.values()))
        while len(self._claims) > MAX_CLAIMS or (self._claimed_in_windows > MAX_IN_WINDOWS and len(self._claims) > 1):
            self._drop_claim(next(iter(self._claims)))

    def _drop_claim(self, name: PromptName) -> None:
        claim, _ = self._claims.pop(name, (None, ()))
        if claim is not None:
            self._claimed_in_windows -= sum(map(len, claim.stored.values()))

    def _fetchable(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        end: int,
        starts: dict[int, int],
        stored: dict[int, set[int]],
    ) -> int:
        """The run up to the first block that could not be fetched a short time ago."""
        self._drop_fetchable_again()
        generations = {one.number: self.generation(one) for one in namespaces}
        bad: dict[int, set[bytes]] = {}
        for (number, key), (_, generation) in self._unfetchable.items():
            if generations.get(number) == generation:
                bad.setdefault(number, set()).add(key)
        if not bad:
            return end
        # One pass over the keys, however many namespaces: prompts are long.
        keys_of_any = set().union(*bad.values())
        for number in range(0 if stored else min(starts.values(), default=end), end):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if key in keys_of_any and any(
                key in bad.get(one.number, ())
                and (number in stored[place] if place in stored else number >= starts.get(place, end))
                for place, one in enumerate(namespaces)
            ):
                return number
        return end

    def _drop_fetchable_again(self) -> None:
        now_s = self._clock_s()
        while self._unfetchable:
            oldest = next(iter(self._unfetchable))
            if self._unfetchable[oldest][0] > now_s:
                return
            del self._unfetchable[oldest]

    def drop_claims(self) -> None:
        """The store went away, or came back: look again before anything is promised."""
        self._claims.clear()
        self._claimed_in_windows = 0

    # --- blocks ----------------------------------------------------------------------------------

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Whether the store had this block when this host last stored or fetched it, not long ago."""
        return self._holds(self._blocks, namespace, key)

    def note(self, namespace: Namespace, key: bytes, generation: int) -> None:
        """The store has this block, as a job found that began in this `generation`."""
        if generation == self.generation(namespace):
            self._unfetchable.pop((namespace.number, key), None)
            self._put(self._blocks, MAX_BLOCKS, namespace, key, KNOWN_S)

    def could_not_fetch(self, namespace: Namespace, key: bytes, generation: int) -> None:
        """The store claimed this block, and did not deliver it, or not what was stored; `generation` as in `note`."""
        if generation == self.generation(namespace):
            self._blocks.pop((namespace.number, key), None)
            self._put(self._unfetchable, MAX_UNFETCHABLE, namespace, key, UNFETCHABLE_S)
            self.drop_claims()

    def is_unfetchable(self, namespace: Namespace, key: bytes) -> bool:
        """Whether it is in vain to ask for this block now. The next store of it overwrites what is there."""
        return self._holds(self._unfetchable, namespace, key)

    def _put(
        self, where: dict[tuple[int, bytes], tuple[float, int]], most: int, of: Namespace, key: bytes, seconds: float
    ) -> None:
        name = of.number, key
        if where.pop(name, None) is None and len(where) >= most:
            del where[next(iter(where))]
        where[name] = self._clock_s() + seconds, self.generation(of)

    def _holds(self, where: dict[tuple[int, bytes], tuple[float, int]], namespace: Namespace, key: bytes) -> bool:
        until_s, generation = where.get((namespace.number, key), (0.0, -1))
        return generation == self.generation(namespace) and self._clock_s() < until_s


def prompt_name(namespaces: Sequence[Namespace], keys: bytes) -> PromptName:
    """What stands for a prompt in a dictionary."""
    return tuple(one.number for one in namespaces), len(keys), keys[:KEY_BYTES], keys[-KEY_BYTES:]
