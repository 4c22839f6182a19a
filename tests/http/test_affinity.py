"""What the affinity query says is what a match finds, and asking changes nothing."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from http_helpers import BLOCK, SALT, affinity, card, chain, connect, spec, tokens_of
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.connectors.vllm.hashes import ENCODINGS, block_hashes, hash_seed
from tiercache.connectors.vllm.names import keys_of
from tiercache.errors import RequestRefused
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import ModelCard, Models, Report

Connect = Callable[..., tiercache.Connector]


@pytest.fixture
def opened() -> Iterator[Connect]:
    """Connectors that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(connect(*arguments, **options))


def ask(client: tiercache.Client, tokens: list[int], model: str = "demo", **fields: str) -> dict[str, Any]:
    """The answer, as soon as the model is known: announcing goes on in the background."""
    query = Query(model=model, tokens=tokens, **{"salt": SALT, **fields})
    finder, answers = Affinity(client), []

    def known() -> bool:
        try:
            answers.append(finder.ask(query))
        except UnknownModel:
            return False
        return True

    wait_until(known, "the model is announced")
    return dict(answers[0])


def matched(connector: tiercache.Connector, keys: bytes) -> dict[str, int]:
    """What a real match finds, in tokens by tier."""
    match = connector.match(keys)
    connector.release(match)
    return {"dram": (match.blocks - match.below_blocks) * BLOCK, "nvme": match.below_blocks * BLOCK, "shared": 0}


def test_the_answer_is_what_a_match_finds(client: tiercache.Client, opened: Connect, url: str) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec())])
    tokens = tokens_of("stored", 20)
    connector.store(chain(tokens)[: 13 * 16], range(13))
    answer = ask(client, [*tokens, 7, 8])
    assert (answer["tokens"], answer["matched"]) == (82, 52)
    assert answer["matched_tokens"] == matched(connector, chain(tokens)) == {"dram": 52, "nvme": 0, "shared": 0}
    assert answer["chains"][0]["namespaces"] == [
        {"fingerprint": spec().fingerprint(), "dram": 52, "nvme": 0, "shared": 0}
    ]
    assert affinity(url, model="demo", tokens=[*tokens, 7, 8], salt=SALT).tree == answer
    by_content = affinity(url, model=content_id("weights").hex(), tokens=[*tokens, 7, 8], salt=SALT).tree
    assert by_content["chains"] == answer["chains"]
    assert ask(client, tokens[:3])["matched"] == 0  # no full block


def test_evicted_blocks_are_not_counted(client: tiercache.Client, opened: Connect) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec())])
    prompts = [tokens_of(f"evicted {number}", 60) for number in range(10)]  # 600 blocks; 512 fit
    for tokens in prompts:
        connector.store(chain(tokens), range(60))
    found = [ask(client, tokens)["matched_tokens"] for tokens in prompts]
    assert found == [matched(connector, chain(tokens)) for tokens in prompts]
    assert 0 < sum(one["dram"] for one in found) < 600 * BLOCK


def test_blocks_on_nvme_are_told_apart(tmp_path: Path, opened: Connect) -> None:
    run_dir, nvme = tmp_path / "run", tmp_path / "nvme"
    settings: dict[str, Any] = {"nvme": nvme, "nvme_size": "64MiB", "nvme_segment": "16MiB", "region": "2MiB"}
    tokens, other = tokens_of("nvme", 30), tokens_of("nvme and dram", 30)
    with tiercache.launch("16MiB", run_dir=run_dir, **settings) as daemon:
        connector = opened(daemon.address, spec())
        connector.announce([card(spec())])
        connector.store(chain(tokens), range(30))
        connector.store(chain(other)[: 12 * 16], range(12))

        def is_recorded() -> bool:
            tier = connector.client.stats()["tiers"]["nvme"]
            return tier["blocks"] == 42 and not any(one["database_queue"] for one in tier["directories"])

        wait_until(is_recorded, "all blocks are on NVMe, and will be found there after a kill")
        connector.flush(tier="dram")
        connector.store(chain(other)[: 5 * 16], range(5))
        assert ask(connector.client, tokens)["matched_tokens"] == {"dram": 0, "nvme": 120, "shared": 0}
        assert ask(connector.client, other)["matched_tokens"] == {"dram": 20, "nvme": 28, "shared": 0}
        assert matched(connector, chain(other)) == {"dram": 20, "nvme": 28, "shared": 0}
        assert ask(connector.client, tokens)["matched_tokens"] == {
            "dram": 0,
            "nvme": 120,
            "shared": 0,
        }  # nothing came up for it
        os.kill(daemon.pid, signal.SIGKILL)
    with tiercache.launch("16MiB", run_dir=run_dir, **settings):  # the engine is met again, and announces again
        wait_until(lambda: connector.available, "the connector is back")
        wait_until(lambda: ask(connector.client, tokens)["matched"] == 120, "the directory is loaded")


@pytest.fixture
def by_age() -> Iterator[tiercache.Client]:
    """A client of a daemon of its own, in which the oldest block goes first."""
    with (
        tiercache.launch("32MiB", region="8MiB", policy="lru") as daemon,
        tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client,
    ):
        yield client


def test_asking_leaves_no_trace(by_age: tiercache.Client, opened: Connect) -> None:
    client = by_age
    connector = opened(client.address, spec())
    connector.announce([card(spec())])
    old, new = tokens_of("old", 30), tokens_of("new", 30)
    connector.store(chain(old), range(30))
    for number in range(7):
        connector.store(chain(tokens_of(f"filler {number}", 60)), range(60))
    connector.store(chain(new), range(30))
    before = client.stats()
    for _ in range(5):
        assert ask(client, old)["matched"] == 120
    after = client.stats()
    assert after["leases"] == before["leases"]
    changed = {name for name, value in after["counters"].items() if value != before["counters"][name]}
    assert changed <= {"requests"}
    connector.store(chain(tokens_of("one more", 40)), range(40))  # the oldest one gives way, asked for or not
    assert ask(client, old)["matched"] < 120 == ask(client, new)["matched"]


def test_without_the_salt_there_is_nothing(client: tiercache.Client, opened: Connect) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec())])
    tokens = tokens_of("secret", 8)
    connector.store(chain(tokens), range(8))
    assert [ask(client, tokens, salt=salt)["matched"] for salt in (SALT, "", "S3cret")] == [32, 0, 0]


def test_a_match_is_what_all_ranks_have(client: tiercache.Client, opened: Connect) -> None:
    ranks = [spec(tp_rank=rank, tp_size=2) for rank in range(2)]
    tokens = tokens_of("ranks", 10)
    for rank, stored in zip(ranks, (10, 4), strict=True):
        connector = opened(client.address, rank)
        connector.store(chain(tokens)[: stored * 16], range(stored))
    connector.announce([card(*ranks)])
    answer = ask(client, tokens)
    assert answer["matched"] == 16
    assert [one["dram"] for one in answer["chains"][0]["namespaces"]] == [40, 16]
    unheard = spec(tp_rank=0, tp_size=3)
    connector.announce([card(ranks[0], unheard)])  # a rank that has not connected yet has nothing
    wait_until(lambda: ask(client, tokens)["matched"] == 0, "the new card is known")


def test_a_model_is_known_while_a_client_announces_it(client: tiercache.Client) -> None:
    with connect(client.address, spec()) as connector:
        connector.announce([card(spec(), name="first"), card(spec(), name="second", model="other")])
        assert ask(client, [1], "second")["chains"][0]["content"] == content_id("other").hex()
        with pytest.raises(UnknownModel, match=r"third: no engine here has announced .* \(there are first, second\)"):
            Affinity(client).ask(Query(model="third", tokens=[1], salt=""))
        connector.announce([card(spec(), name="third")])
        assert ask(client, [1], "third")["chains"][0]["names"] == ["third"]
    wait_until(lambda: not client.call(Models).models, "the session has ended")  # type: ignore[union-attr]
    with pytest.raises(UnknownModel, match="none has announced one"):
        Affinity(client).ask(Query(model="third", tokens=[1], salt=""))


def test_a_model_is_known_as_soon_as_it_is_announced(client: tiercache.Client) -> None:
    """Also to a finder that has just fetched a list without it."""
    finder = Affinity(client)
    with connect(client.address, spec()) as connector:
        for number in range(5):
            name = f"new {number}"
            with pytest.raises(UnknownModel):
                finder.ask(Query(model=name, tokens=[1], salt=""))
            connector.announce([card(spec(), name=name)])
            ask(client, [1], name)  # which waits for a list with it
            finder.ask(Query(model=name, tokens=[1], salt=""))


def test_what_two_engines_announce_is_listed_once(client: tiercache.Client, opened: Connect) -> None:
    for _ in range(2):
        opened(client.address, spec()).announce([card(spec())])
    opened(client.address, spec()).announce([card(spec(), model="same name")])
    wait_until(lambda: len(client.call(Models).models) == 2, "both models are known")  # type: ignore[union-attr]
    assert len(ask(client, [1])["chains"]) == 2


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ({"content": b"short"}, "bad_value", "content is 5 bytes"),
        ({"namespaces": []}, "bad_value", "0 namespaces"),
        ({"block_size": 0}, "bad_value", "must be at least 1 token"),
        ({"hashing": "vllm/sha256"}, "bad_value", "must be at least 1 token"),
        ({"names": ["x" * 33_000]}, "too_large", "more than 32768 bytes"),
    ],
)
def test_an_unusable_card_is_refused(client: tiercache.Client, wrong: dict[str, Any], code: str, words: str) -> None:
    fields = {"names": ["x"], "content": bytes(16), "namespaces": ["f"], "block_size": 4, **wrong}
    with pytest.raises(RequestRefused, match=words) as refused:
        client.call(Report, registration="none", counters={}, models=[ModelCard(**fields)])
    assert refused.value.code == code


@pytest.mark.parametrize("algorithm", sorted(ENCODINGS))
def test_chains_under_vllm_hashes(client: tiercache.Client, opened: Connect, algorithm: str) -> None:
    """Blocks are named as the connector names them; `make test-vllm` checks that the hashes are vLLM's own."""
    connector = opened(client.address, spec())
    tokens, seed = tokens_of(algorithm, 12), hash_seed(algorithm, {})
    engine = ModelCard(["v"], content_id("v"), [spec().fingerprint()], BLOCK, f"vllm/{algorithm}", 2, seed)
    content = content_id("v", extra=[("adapter", "a")])
    adapted = ModelCard(["v"], content, engine.namespaces, BLOCK, engine.hashing, 2, seed, "sql", "/sql")
    for number, one in enumerate((engine, adapted)):
        adapter = (one.adapter, one.adapter_path) if one.adapter else None
        hashes = block_hashes(algorithm, seed, tokens, 2, adapter)
        keys = keys_of(salted_root(one.content, SALT), hashes, 2, 0, 9 - number)
        connector.store(keys, range(9 - number))
    connector.announce([engine, adapted])
    assert ask(client, tokens, "v")["matched"] == 36
    assert ask(client, tokens, "v", lora="sql")["matched"] == ask(client, tokens, "sql")["matched"] == 32
    assert ask(client, tokens, "v", cache_salt="x")["matched"] == 0
    connector.announce([ModelCard(["v"], content_id("v"), engine.namespaces, BLOCK, "vllm/sha512", 2, seed)])
    wait_until(lambda: ask(client, tokens, "v")["matched"] == 0, "the card with an unknown hash algorithm")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65_535, "19ffff"),
        (1_000_000, "1a000f4240"),
        (1_000_000_000_000, "1b000000e8d4a51000"),
        ("IETF", "6449455446"),
        (bytes([1, 2, 3, 4]), "4401020304"),
        ((), "80"),
        ((1, (2, 3), None), "83018202 03f6"),
    ],
)
def test_canonical_cbor(value: Any, encoded: str) -> None:
    """Examples of RFC 8949, appendix A."""
    assert ENCODINGS["sha256_cbor"](value) == bytes.fromhex(encoded)


def run_cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiercache.cli.main", "affinity", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_asks_a_daemon_or_a_port(client: tiercache.Client, opened: Connect, url: str) -> None:
    connector = opened(client.address, spec())
    connector.announce([card(spec(), name="cli")])
    tokens = tokens_of("cli", 6)
    connector.store(chain(tokens), range(6))
    assert ask(client, tokens, "cli")["matched"] == 24
    common = ["--model", "cli", "--tokens", "-", "--salt", SALT]
    for target in (client.address, url, f"{url}/v1/affinity"):
        told = run_cli("--address", target, *common, stdin=str(tokens))
        assert (told.returncode, told.stderr) == (0, "")
        assert ["stored", "24", "(100.0%)"] in [line.split() for line in told.stdout.splitlines()]
    assert run_cli("--address", url, *common, "--json", stdin="1 2,3").stdout.count('"matched": 0') == 2
    assert run_cli("--address", url, *common, stdin="[]").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--tokens", "-"], 2, "--salt is missing"),
        (["--salt", ""], 2, "give either --text, --tokens or --segments"),
        (["--salt", "", "--tokens", "/nowhere"], 2, "--tokens /nowhere cannot be read"),
        (["--salt", "", "--tokens", "-"], 2, "has no list of token ids"),
        (["--salt", "", "--tokens", "-", "--segments", "-"], 2, "give either --text, --tokens or --segments"),
        (["--salt", "", "--segments", "/nowhere"], 2, "--segments /nowhere cannot be read"),
        (["--salt", "", "--segments", "-"], 2, "has no JSON of a prompt in parts"),
        (["--address", "http://127.0.0.1:1", "--salt", "", "--tokens", "/dev/null"], 1, "does not answer"),
        (["--address", "/nowhere", "--salt", "", "--tokens", "/dev/null"], 1, "no daemon at /nowhere"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two"))
    assert main(["affinity", "--model", "x", *arguments]) == status
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert words in told
