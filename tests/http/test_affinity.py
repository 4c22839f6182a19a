"""What the affinity query says is what a match finds, and asking changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from http_helpers import BLOCK, SALT, affinity, ask_affinity, card, chain, connect, spec, tokens_of
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.connectors.vllm.names import ENCODINGS, block_hashes, hash_seed, keys_of
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import ModelCard, Models

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
