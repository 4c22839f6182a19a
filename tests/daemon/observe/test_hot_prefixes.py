"""Hot paths of the prefix tree against a plain count of every block of every match."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.observe import hot_prefixes as hotpaths
from tiercache.daemon.observe.hot_prefixes import HALF_LIFE_S, HotPaths
from tiercache.daemon.policies import Policies
from tiercache.daemon.tiers.dram.space import Space
from tiercache.protocol.namespaces import NamespaceSpec

Steps = tuple[int, ...]


class Tree:
    """Chains, named by the path to their end, are matched in a cache of one or two namespaces; time stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.space = Space(Policies("lru", time.monotonic), Counters())
        self.paths = HotPaths(lambda: self.now_s)
        self.spaces = [self.space.open_namespace(_spec(name)) for name in ("a", "b")]

    def match(self, steps: Steps, space: int = 0) -> None:
        self.paths.matched(self.spaces[space], chain(steps), len(steps))

    def shown(self, limit: int = hotpaths.MAX_SHOWN) -> list[dict[str, Any]]:
        return self.paths.snapshot(limit, self.space.index)


def _spec(engine: str) -> NamespaceSpec:
    return NamespaceSpec(engine=engine, layout="x", dtype="uint8", block_size=16, block_bytes=4096)


def key(steps: Steps) -> bytes:
    """A key that names all steps that lead to it."""
    return hash(steps).to_bytes(8, "little", signed=True) * 2


def chain(steps: Steps) -> bytes:
    return b"".join(key(steps[: depth + 1]) for depth in range(len(steps)))


def name(steps: Steps) -> str:
    return key(steps)[:4].hex()


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=60)


@given(paths=PATHS)
def test_places_and_hits_are_those_of_a_plain_count(paths: list[Steps]) -> None:
    tree = Tree()
    for steps in paths:
        tree.match(steps)
    through = Counter(steps[:depth] for steps in paths for depth in range(1, len(steps) + 1))
    shown = {one["name"]: one for one in tree.shown()}
    for steps, hits in through.items():
        below = {other for other in through if other[:-1] == steps}
        is_place = steps in paths or len(below) > 1  # where a path ends, or where paths part
        assert (name(steps) in shown) == is_place, steps
        if is_place:
            assert (shown[name(steps)]["hits"], shown[name(steps)]["blocks"]) == (hits, len(steps))


def test_hits_fade() -> None:
    tree = Tree()
    for _ in range(100):
        tree.match((1, 2))
    tree.now_s += 2 * HALF_LIFE_S
    tree.match((3,))
    assert [(one["name"], one["hits"]) for one in tree.shown()] == [(name((1, 2)), 25.0), (name((3,)), 1.0)]
    tree.now_s += 100 * HALF_LIFE_S
    assert tree.shown() == []


def test_no_key_is_shown() -> None:
    tree = Tree()
    tree.match((1, 2, 3))
    text = repr(tree.shown())
    assert name((1, 2, 3)) in text
    assert all(key((1, 2, 3)[:depth]).hex()[:16] not in text for depth in (1, 2, 3))
