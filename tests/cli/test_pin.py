"""`tiercache ls`, `inspect`, `pin` and `unpin` against a real daemon with a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from command_line import Run, assert_refused
from waiting import wait_until

import tiercache
from tiercache.cli import affinity
from tiercache.protocol.keys import salted_root
from tiercache.protocol.messages import ModelCard, Peek

BLOCKS = 12
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=4096)
KEYS = tiercache.KeyChain(tiercache.root_key("model"), 4, range(4 * BLOCKS)).packed()


def key(number: int) -> str:
    return KEYS[16 * number : 16 * (number + 1)].hex()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiercache.Connector]:
    """The engine of a daemon with one stored prompt of an announced model."""
    folder = tmp_path_factory.mktemp("cli")
    settings: dict[str, Any] = {"nvme": str(folder / "kv"), "nvme_size": "64MiB", "nvme_segment": "8MiB"}
    pool = tiercache.Pool.from_blocks(np.zeros((16, 4096), np.uint8))
    with (
        tiercache.launch("4MiB", pin_share=0.01, **settings) as running,
        tiercache.connect(running.address, namespace=SPEC, pool=pool, name="engine", required=True) as connector,
    ):
        connector.client.announce([ModelCard(["demo"], bytes(16), [SPEC.fingerprint()], 4)])
        assert connector.store(KEYS, list(range(BLOCKS))).stored == BLOCKS
        wait_until(lambda: connector.client.stats()["tiers"]["nvme"]["blocks"] == BLOCKS, "all blocks are on NVMe")
        yield connector


@pytest.fixture
def ask(engine: tiercache.Connector, run: Run) -> Run:
    """Runs one command line about this daemon."""
    return lambda *arguments: run(*arguments, "--address", engine.client.address)


def test_ls_shows_whose_blocks_are_where(ask: Run) -> None:
    wait_until(lambda: "demo" in ask("ls")[1], "the card has come with the engine's next report")
    status, out, _ = ask("ls")
    assert (status, SPEC.fingerprint()[:12] in out, "12 (48.0 KiB)" in out) == (0, True, True)
    [row] = json.loads(ask("ls", "--json")[1])
    assert (row["models"], row["blocks"], row["below_blocks"], row["pinned_blocks"]) == (["demo"], 12, 12, 0)


def test_inspect_finds_a_block_in_every_tier(ask: Run) -> None:
    found = json.loads(ask("inspect", key(3), "--json")[1])
    assert (found["found"], found["depth"]) == (True, 4)
    places = [(one["tier"], one["checksum"], one["children"]) for one in found["places"]]
    assert places == [("dram", "", 1), ("nvme", "xxh3", 1)]
    status, out, _ = ask("inspect", key(3))
    assert (status, "block 4 of its chain" in out, "# copies" in out) == (0, True, True)
    assert ask("inspect", "ff" * 16)[:2] == (1, f"block {'ff' * 16} is in no tier, of no namespace\n")


def test_a_prefix_is_pinned_by_its_last_key(ask: Run, engine: tiercache.Connector) -> None:
    engine.client.flush(tier="dram")
    # A hundredth of the arena: 10 blocks. They are on the disk only, and come up for the pin.
    status, out, _ = ask("pin", key(5), "--ttl", "1h")
    assert (status, out) == (0, "6 of 6 blocks pinned for 60.0 min\n")
    number = engine.client.stats()["namespaces"][0]["id"]
    assert engine.client.session().call(Peek, namespaces=[number], keys=KEYS[:96]).dram_blocks == 6
    listed = json.loads(ask("ls", "--pins", "--json")[1])
    assert [(pin["key"], pin["blocks"]) for pin in listed["pins"]] == [(key(5), 6)]
    assert "24.0 KiB of 41.0 KiB that pins may keep (--pin-share)" in ask("ls", "--pins")[1]
    status, out, _ = ask("pin", key(11))
    assert status == 1, "blocks beyond the share are not pinned"
    assert out.startswith("4 of 12 blocks pinned for 60.0 min\nthe rest exceeds what pins may keep")
    assert ask("unpin", key(5))[:2] == (0, "1 pin ended, 6 blocks may be evicted again\n")
    assert json.loads(ask("unpin", "--all", "--json")[1]) == {"ended_pins": 1, "unpinned_blocks": 4}
    assert ask("unpin", "--all")[:2] == (1, "nothing is pinned\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["unpin"], "give either the KEY"),
        (["unpin", "00" * 16, "--all"], "give either the KEY"),
        (["pin", "0011"], "is not a key of a block"),
        (["pin", "00" * 16], "is in no tier"),
        (["pin", "00" * 16, "--ttl", "8d"], "--ttl = 8d: must be more than 0, and at most 7d"),
        (["pin", "00" * 16, "--namespace", "zz"], "--namespace = zz: no such namespace"),
        (["pin", "some words", "--model", "demo"], "--salt is missing"),
        (["inspect", "a prompt"], "a prompt: is not a key (32 hex digits), and a prompt needs --model"),
    ],
)
def test_wrong_ones_are_one_line(ask: Run, arguments: list[str], words: str) -> None:
    assert_refused(ask(*arguments), words)


def test_a_prompt_is_pinned_by_its_words(
    engine: tiercache.Connector, monkeypatch: pytest.MonkeyPatch, ask: Run
) -> None:
    tokens = list(range(100, 122))
    chain = tiercache.KeyChain(salted_root(bytes(16), "s3"), 4, tokens).packed()
    assert engine.store(chain, list(range(5))).stored == 5
    monkeypatch.setattr(affinity, "tokenise", lambda model, text: tokens)
    prompt = ["pin", "some words", "--model", "demo", "--salt"]
    wait_until(lambda: ask(*prompt, "s3")[:2] == (0, "5 of 5 blocks pinned for 60.0 min\n"), "the card has come")
    assert ask("unpin", chain[-16:].hex())[0] == 0
    assert_refused(ask(*prompt, "other"), "nothing is stored of this prompt for demo")
