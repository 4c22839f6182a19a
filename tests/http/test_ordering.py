"""The order that an affinity query finds is the best of all, and its figures are those of the prompt in that order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import permutations, product
from typing import Any, cast

import pytest
from http_helpers import BLOCK
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.client.session import Session
from tiercache.connectors.vllm.names import hash_seed
from tiercache.http.affinity import Query
from tiercache.http.ordering import Budget, OrderSearch
from tiercache.http.peeking import ModelBlocks, ModelsKnown
from tiercache.http.query import Order, Unordered
from tiercache.protocol.keys import content_id
from tiercache.protocol.messages import CHAIN_HASHING, KEY_BYTES, ModelCard, Peeked

Part = list[int] | Unordered


class Blocks:
    """Answers peeks as a daemon does: what a match would find in namespaces that hold these keys.

    `windows`: of each namespace, 0 for a chain.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows = windows
        self.held: list[set[bytes]] = [set() for _ in windows]
        self.peeks = 0

    def store(self, keys: bytes, missing: Collection[int] = (), end: int | None = None) -> None:
        """Chains keep what is before `end`, windows all that is not missing."""
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        for window, held in zip(self.windows, self.held, strict=True):
            held |= {key for number, key in enumerate(split) if number not in missing} if window else {*split[:end]}

    def call(self, kind: Any, namespaces: list[int], keys: bytes) -> Peeked:
        self.peeks += 1
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        each = [(self._run([one], split), 0) for one in namespaces]
        return Peeked(0, 0, self._run(namespaces, split), 0, each, 0, [0] * len(each))

    def _run(self, namespaces: list[int], keys: list[bytes]) -> int:
        def has(number: int, cut: int) -> bool:
            first = max(0, cut - self.windows[number]) if self.windows[number] else 0
            return all(key in self.held[number] for key in keys[first:cut])

        return next(cut for cut in range(len(keys), -1, -1) if all(has(number, cut) for number in namespaces))


def stored_in(blocks: Blocks, query: Query, hashing: str = CHAIN_HASHING, size: int = BLOCK) -> ModelBlocks:
    names = [f"n{number}" for number in range(len(blocks.windows))]
    seed = b"" if hashing == CHAIN_HASHING else hash_seed("sha256", {})
    model = ModelCard(["m"], content_id("w"), names, size, hashing, size if seed else 0, seed)
    windows = {name: window for name, window in zip(names, blocks.windows, strict=True) if window}
    numbers = {name: number for number, name in enumerate(names)}
    return ModelBlocks(ModelsKnown(cast("Session", blocks), 0.0, [model], numbers, windows), model, query)


def every_order(query: Query) -> Iterator[Order]:
    return (list(map(list, one)) for one in product(*(permutations(order) for order in query.as_given)))


TOKENS = st.lists(st.integers(0, 1), max_size=5)
PARTS = st.lists(st.one_of(TOKENS, st.builds(Unordered, st.lists(TOKENS, max_size=4))), min_size=1, max_size=3).filter(
    lambda parts: math.prod(math.factorial(len(one.unordered)) for one in parts if isinstance(one, Unordered)) < 200
)


@pytest.mark.parametrize("windows", [[0], [0, 2], [0, 0, 3], [2]], ids=str)
@given(parts=PARTS, data=st.data(), size=st.integers(1, 3), hashing=st.sampled_from([CHAIN_HASHING, "vllm/sha256"]))
@settings(max_examples=60, deadline=None)
def test_no_order_has_more_than_the_one_found(
    windows: list[int], parts: list[Part], data: st.DataObject, size: int, hashing: str
) -> None:
    query = Query(model="m", segments=parts, salt="s", cache_salt="c")
    blocks = Blocks(windows)
    stored = stored_in(blocks, query, hashing, size)
    orders = list(every_order(query))
    for order in data.draw(st.lists(st.sampled_from(orders), max_size=3)):
        keys = stored.names.keys(query.prompt(order))
        blocks.store(keys, data.draw(st.sets(st.integers(0, 8), max_size=3)), data.draw(st.integers(0, 9)))
    found = OrderSearch(stored, query, Budget(until_s=math.inf)).find()
    assert found.order in orders
    assert found.matched == stored.matched(query.prompt(found.order))
    assert found.as_given == stored.matched(query.prompt(query.as_given))
    assert found.complete
    assert found.matched == max(stored.matched(query.prompt(order)) for order in orders)
    if found.matched == found.as_given:
        assert found.order == query.as_given


def documents(count: int, length: int) -> list[list[int]]:
    return [list(range(number * 1000, number * 1000 + length)) for number in range(count)]


@pytest.mark.parametrize("limit", [{"looks": 10}, {"left_bytes": 200 * KEY_BYTES}, {"until_s": 0.0}], ids=str)
def test_a_search_beyond_its_limits_says_so(limit: dict[str, Any]) -> None:
    query = Query(model="m", segments=[[7] * 8, Unordered(documents(64, 100)), [9]], salt="")
    blocks = Blocks([0, 4])
    stored = stored_in(blocks, query)
    backwards = [list(range(63, -1, -1))]
    blocks.store(stored.names.keys(query.prompt(backwards)))
    found = OrderSearch(stored, query, Budget(**{"until_s": math.inf, **limit})).find()
    assert not found.complete
    assert found.matched == stored.matched(query.prompt(found.order)) >= found.as_given
