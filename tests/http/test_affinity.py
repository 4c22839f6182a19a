"""What the affinity query says is what a match finds, and the order that it finds is the best of all."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import permutations, product
from typing import Any, cast

import pytest
from http_helpers import BLOCK, SALT, affinity, ask_affinity, card, chain, connect, spec, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.client.session import Session
from tiercache.connectors.vllm.names import ENCODINGS, block_hashes, hash_seed, keys_of
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.http.ordering import Budget, OrderSearch
from tiercache.http.peeking import ModelBlocks, ModelsKnown
from tiercache.http.query import Order, Unordered
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import CHAIN_HASHING, KEY_BYTES, ModelCard, Models, Peeked

Opened = Callable[[tiercache.NamespaceSpec], tiercache.Connector]


def matched(connector: tiercache.Connector, keys: bytes) -> dict[str, int]:
    """What a real match finds, in tokens by tier."""
    match = connector.match(keys)
    connector.release(match)
    return {"dram": (match.blocks - match.below_blocks) * BLOCK, "nvme": match.below_blocks * BLOCK, "shared": 0}


def test_the_answer_is_what_a_match_finds(client: tiercache.Client, opened: Opened, url: str) -> None:
    connector = opened(spec())
    connector.announce([card(spec())])
    tokens = tokens_of("stored", 20)
    connector.store(chain(tokens)[: 13 * 16], range(13))
    answer = ask_affinity(client, tokens=[*tokens, 7, 8])
    assert (answer["tokens"], answer["matched"]) == (82, 52)
    assert answer["matched_tokens"] == matched(connector, chain(tokens)) == {"dram": 52, "nvme": 0, "shared": 0}
    rank = {"fingerprint": spec().fingerprint(), "dram": 52, "nvme": 0, "shared": 0}
    assert answer["chains"][0]["namespaces"] == [rank]
    assert affinity(url, model="demo", tokens=[*tokens, 7, 8], salt=SALT).tree == answer
    by_content = affinity(url, model=content_id("weights").hex(), tokens=[*tokens, 7, 8], salt=SALT).tree
    assert by_content["chains"] == answer["chains"]
    assert ask_affinity(client, tokens=tokens[:3])["matched"] == 0, "no full block"
    assert [ask_affinity(client, tokens=tokens, salt=salt)["matched"] for salt in ("", "S3cret")] == [0, 0]


def test_asking_leaves_no_trace(client: tiercache.Client, opened: Opened) -> None:
    connector = opened(spec())
    connector.announce([card(spec())])
    old, new = tokens_of("old", 30), tokens_of("new", 30)
    connector.store(chain(old), range(30))
    for number in range(7):
        connector.store(chain(tokens_of(f"filler {number}", 60)), range(60))
    connector.store(chain(new), range(30))
    assert ask_affinity(client, tokens=old)["matched"] == 120
    before = client.stats()
    for _ in range(5):
        assert ask_affinity(client, tokens=old)["matched"] == 120
    after = client.stats()
    assert after["leases"] == before["leases"]
    for name in ("match_requests", "match_blocks_hit", "loads_good"):
        assert after["counters"][name] == before["counters"][name]
    connector.store(chain(tokens_of("one more", 40)), range(40))  # the oldest one gives way, asked for or not
    assert ask_affinity(client, tokens=old)["matched"] < 120 == ask_affinity(client, tokens=new)["matched"]


def test_a_model_is_known_while_a_client_announces_it(client: tiercache.Client) -> None:
    finder = Affinity(client)

    def listed() -> list[ModelCard]:
        return client.session().call(Models).models

    with connect(client.address, spec()) as connector, connect(client.address, spec()) as another:
        connector.announce([card(spec(), name="first"), card(spec(), name="second", model="other")])
        found = ask_affinity(client, model="second", tokens=[1])
        assert found["chains"][0]["content"] == content_id("other").hex()
        with pytest.raises(UnknownModel, match=r"third: no engine here has announced .* \(there are first, second\)"):
            finder.ask(Query(model="third", tokens=[1], salt=""))
        connector.announce([card(spec(), name="third")])
        ask_affinity(client, model="third", tokens=[1])
        assert finder.ask(Query(model="third", tokens=[1], salt="")), "known to a finder with an older list too"
        another.announce([card(spec(), name="third")])
        another.announce([card(spec(), name="third"), card(spec(), name="third", model="b")])
        wait_until(lambda: len(listed()) == 2, "what two engines announce is listed once")
        assert len(ask_affinity(client, model="third", tokens=[1])["chains"]) == 2
    wait_until(lambda: not listed(), "the sessions have ended")
    with pytest.raises(UnknownModel, match="none has announced one"):
        Affinity(client).ask(Query(model="third", tokens=[1], salt=""))


@pytest.mark.parametrize("algorithm", sorted(ENCODINGS))
def test_chains_under_vllm_hashes(client: tiercache.Client, opened: Opened, algorithm: str) -> None:
    """Blocks are named as the connector names them; `make test-vllm` checks that the hashes are vLLM's own."""
    connector = opened(spec())
    tokens, seed = tokens_of(algorithm, 12), hash_seed(algorithm, {})
    engine = ModelCard(["v"], content_id("v"), [spec().fingerprint()], BLOCK, f"vllm/{algorithm}", 2, seed)
    content = content_id("v", extra=[("adapter", "a")])
    adapted = ModelCard(["v"], content, engine.namespaces, BLOCK, engine.hashing, 2, seed, "sql", "/sql")
    for number, one in enumerate((engine, adapted)):
        adapter = (one.adapter, one.adapter_path) if one.adapter else None
        hashes = block_hashes(algorithm, seed, tokens, 2, adapter)
        connector.store(keys_of(salted_root(one.content, SALT), hashes, 2, 0, 9 - number), range(9 - number))
    connector.announce([engine, adapted])

    def found(model: str = "v", **fields: str) -> int:
        return int(ask_affinity(client, tokens=tokens, model=model, **fields)["matched"])

    assert (found(), found(lora="sql"), found("sql"), found(cache_salt="x")) == (36, 32, 32, 0)
    connector.announce([ModelCard(["v"], content_id("v"), engine.namespaces, BLOCK, "vllm/sha512", 2, seed)])
    wait_until(lambda: found() == 0, "the card with an unknown hash algorithm")


def test_the_command_asks_a_daemon_or_a_port(
    client: tiercache.Client, opened: Opened, url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    connector = opened(spec())
    connector.announce([card(spec(), name="cli")])
    segments = [tokens_of(f"cli {number}", 2) for number in range(3)]
    tokens = segments[2] + segments[0]
    connector.store(chain(tokens), range(4))
    ask_affinity(client, model="cli", tokens=[1])

    def told(address: str, kind: str, stdin: str) -> list[list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        command = ["affinity", "--model", "cli", kind, "-", "--salt", SALT, "--address", address]
        assert main(command) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    for address in (client.address, url, f"{url}/v1/affinity"):
        assert ["stored", "16", "(100.0%)"] in told(address, "--tokens", str(tokens))
        lines = told(address, "--segments", json.dumps([{"unordered": segments}, [1]]))
        assert ["stored", "16", "(64.0%)"] in lines
        assert ["stored", "in", "the", "order", "given", "0"] in lines
        assert ["group", "0", "2", "0", "1"] in lines


# --- the best order, and its figures are those of the prompt in that order ---------------------------


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
