"""The order that an affinity query finds is the best of all, and its figures are those of the prompt in that order."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import permutations, product
from typing import Any, cast

import pytest
from http_helpers import BLOCK, SALT, affinity, card, chain, connect, spec, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.client.session import Session
from tiercache.connectors.vllm.hashes import hash_seed
from tiercache.http import ordering
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.http.app import MAX_SEARCHES, THREADS, HttpError, PortRoutes
from tiercache.http.ordering import Budget, OrderSearch
from tiercache.http.peeking import ModelBlocks, ModelsKnown
from tiercache.http.query import MAX_SEGMENTS, Order, Unordered
from tiercache.protocol.keys import content_id
from tiercache.protocol.messages import CHAIN_HASHING, KEY_BYTES, ModelCard, Peeked

Part = list[int] | Unordered
Connect = Callable[..., tiercache.Connector]


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

    def call(self, kind: Any, reply: Any, namespaces: list[int], keys: bytes) -> Peeked:
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


def test_a_peek_asks_for_the_new_blocks_only() -> None:
    """64 documents, stored in the worst order: a peek or two for each that is tried, and few keys."""
    query = Query(model="m", segments=[Unordered(documents(64, 100))], salt="")
    blocks = Blocks([0])
    stored = stored_in(blocks, query)
    backwards = [list(range(63, -1, -1))]
    blocks.store(stored.names.keys(query.prompt(backwards)))
    budget = Budget(until_s=math.inf)
    found = OrderSearch(stored, query, budget).find()
    assert (found.order, found.matched, found.complete) == (backwards, 6400, True)
    tried = 64 * 65 // 2
    assert ordering.MAX_LOOKS - budget.looks <= tried
    assert blocks.peeks <= tried + 64 + 1
    assert ordering.MAX_BYTES - budget.left_bytes <= (tried * ordering.FIRST_BLOCKS + 1600) * KEY_BYTES


def test_a_window_reaches_back_over_the_border() -> None:
    """Block 1 is missing, and a window of 3 that ends with block 3, of the second segment, needs it."""
    query = Query(model="m", segments=[Unordered([[1] * 8, [2] * 12, [3] * 8])], salt="")
    blocks = Blocks([0, 3])
    stored = stored_in(blocks, query)
    blocks.store(stored.names.keys(query.prompt([[1, 2, 0]]))[: 4 * KEY_BYTES], missing={1})
    found = OrderSearch(stored, query, Budget(until_s=math.inf)).find()
    assert (found.order, found.matched) == ([[1, 0, 2]], 4)
    blocks.store(stored.names.keys(query.prompt([[1, 2, 0]]))[: 5 * KEY_BYTES], missing={1})
    assert OrderSearch(stored, query, Budget(until_s=math.inf)).find()[:2] == ([[1, 2, 0]], 20)


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


# --- with a daemon --------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[Connect]:
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(connect(*arguments, **options))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "SEARCH_S", 60.0)


def ask(client: tiercache.Client, query: Query) -> dict[str, Any]:
    finder, answers = Affinity(client), []

    def known() -> bool:
        try:
            answers.append(finder.ask(query))
        except UnknownModel:
            return False
        return True

    wait_until(known, "the model is announced")
    return dict(answers[0])


@pytest.mark.usefixtures("patient")
def test_a_daemon_finds_it_among_all_orders(client: tiercache.Client, opened: Connect, url: str) -> None:
    forms = [spec(), spec(group="window", window_blocks=3)]
    documents = [tokens_of(f"document {number}", 3)[: 12 - number] for number in range(4)]
    parts: list[Part] = [[1, 2, 3], Unordered(documents), [4], Unordered([[5, 6], [7, 8]]), [9, 10, 11]]
    query = Query(model="demo", segments=parts, salt=SALT)
    for form in forms:
        connector = opened(client.address, form)
        connector.announce([card(*forms)])
        for order, blocks in (([[2, 0, 1, 3], [0, 1]], 5), ([[2, 3, 1, 0], [1, 0]], 99)):
            keys = chain(query.prompt(order))[: blocks * 16]
            connector.store(keys, range(len(keys) // 16))
    plain = [
        (ask(client, Query(model="demo", tokens=query.prompt(order), salt=SALT)), order) for order in every_order(query)
    ]
    best, order = max(plain, key=lambda pair: int(pair[0]["matched"]))
    answer = ask(client, query)
    given = next(one for one, order in plain if order == query.as_given)
    assert (answer.pop("order"), answer.pop("complete"), answer.pop("matched_as_given")) == (
        order,
        True,
        given["matched"],
    )
    assert order == [[2, 3, 1, 0], [1, 0]]
    assert answer == best
    body = [part if isinstance(part, list) else {"unordered": part.unordered} for part in parts]
    assert affinity(url, model="demo", segments=body, salt=SALT).tree["order"] == order
    assert affinity(url, model="demo", segments=body, salt="other").tree["order"] == query.as_given


@pytest.mark.usefixtures("patient")
def test_of_models_with_one_name_the_longest_run_decides(client: tiercache.Client, opened: Connect) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec(), name="two", model="a"), card(spec(), name="two", model="b")])
    segments = [tokens_of(f"two {number}", 2) for number in range(3)]
    query = Query(model="two", segments=[Unordered(segments)], salt=SALT)
    for model, order, blocks in (("a", [1, 0, 2], 3), ("b", [2, 1, 0], 4)):
        keys = chain(query.prompt([order]), model)[: blocks * 16]
        connector.store(keys, range(blocks))
    answer = ask(client, query)
    assert (answer["order"], answer["matched"], answer["complete"]) == ([[2, 1, 0]], 16, True)
    assert [one["matched"] for one in answer["chains"]] == [0, 16]


def test_the_command_prints_the_order(
    client: tiercache.Client,
    opened: Connect,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec(), name="told")])
    segments = [tokens_of(f"told {number}", 2) for number in range(3)]
    connector.store(chain(segments[2] + segments[0]), range(4))
    ask(client, Query(model="told", tokens=[1], salt=SALT))
    for address in (client.address, url):
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([{"unordered": segments}, [1]])))
        command = ["affinity", "--model", "told", "--segments", "-", "--salt", SALT, "--address", address]
        assert main(command) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["stored", "16", "(64.0%)"] in lines
        assert ["stored", "in", "the", "order", "given", "0"] in lines
        assert ["group", "0", "2", "0", "1"] in lines
    monkeypatch.setattr("sys.stdin", io.StringIO('{"unordered": []}'))
    assert main([*command[:-1], client.address]) == 2
    assert "Expected `array`, got `object` - at `$.segments`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either as tokens or as segments"),
        ({"tokens": [1], "segments": []}, "either as tokens or as segments"),
        ({"segments": "x"}, "Expected `array`"),
        ({"segments": [5]}, "Expected `object | array`, got `int` - at `$.segments[0]`"),
        ({"segments": [[1], {"unordered": [[1], ["a"]]}]}, "$.segments[1].unordered[1][0]"),
        ({"segments": [[1], {"unordered": [1]}]}, "Expected `array`"),
        ({"segments": [[-1]]}, ">= 0"),
        ({"segments": [{}]}, "missing required field `unordered`"),
        ({"segments": [{"unordered": [], "order": 1}]}, "unknown field `order`"),
        ({"segments": [{"unordered": [[1]] * MAX_SEGMENTS}, [1]]}, f"{MAX_SEGMENTS + 1} segments: at most"),
        ({"segments": [{"unordered": []}] * 100_000}, "100000 segments: at most"),
    ],
)
def test_wrong_segments_are_told_what_is_wrong(url: str, fields: dict[str, Any], words: str) -> None:
    answer = affinity(url, model="m", salt="", **fields)
    assert (answer.status, answer.code) == (400, "bad_query")
    message = answer.tree["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_more_searches_than_a_few_are_told_to_come_again() -> None:
    assert MAX_SEARCHES < THREADS // 2, "others have threads left"
    routes = PortRoutes.__new__(PortRoutes)
    query, release = Query(model="m", segments=[Unordered([[1], [2]])], salt=""), asyncio.Event()

    async def wait(question: Any) -> dict[str, Any]:
        await release.wait()
        return {"order": [[0, 1]]}

    routes._searches, routes._ask = 0, wait  # type: ignore[method-assign, assignment]

    async def ask() -> list[Any]:
        under_way = [asyncio.ensure_future(routes._search(query)) for _ in range(MAX_SEARCHES)]
        await asyncio.sleep(0)
        with pytest.raises(HttpError, match="try again") as refused:
            await routes._search(query)
        assert (refused.value.status, refused.value.code) == (503, "busy")
        release.set()
        await asyncio.gather(*under_way)
        return [await routes._search(query)]

    assert asyncio.run(ask())[0].status_code == 200
