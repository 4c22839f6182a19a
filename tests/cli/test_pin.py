"""`tiercache ls`, `inspect`, `pin`, `unpin` and `flush` against a real daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import COMMAND, Run, assert_refused
from terminal import Terminal
from waiting import wait_until

import tiercache
from tiercache.cli import affinity, flush
from tiercache.errors import ConfigError
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
        tiercache.connect(
            running.address, namespace=SPEC, pool=pool, name="engine", required=True, request_timeout_s=60.0
        ) as connector,
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


# --- flush: what it asks before, whom it concerns, and what it says after ----------------------------


def test_flush(run: Run, daemon: Path) -> None:
    assert run("flush", "--yes", "--address", daemon)[:2] == (0, "0 blocks flushed\n")
    answer = json.loads(run("flush", "--yes", "--json", "--tier", "dram", "--address", daemon)[1])
    named = {"tier": "dram", "namespaces": [], "prefix": ""}
    assert answer == {"flushed_blocks": 0, **named, "shared_store_told": None}
    for option, value, words in (("--namespace", "9f", "no such namespace"), ("--tier", "shared", "no shared tier")):
        assert_refused(run("flush", "--yes", option, value, "--address", daemon), f"{option} = {value}", words)


@pytest.mark.parametrize(("answer", "status", "words"), [("y\n", 0, "0 blocks flushed"), ("n\n", 2, "stopped")])
def test_flush_on_a_terminal_asks_first(daemon: Path, answer: str, status: int, words: str) -> None:
    with Terminal([*COMMAND, "flush", "--address", str(daemon)], columns=120) as terminal:
        terminal.shows("Forget all blocks of every namespace in all tiers (0 blocks are held now)? [y/N]")
        terminal.press(answer)
        assert terminal.wait() == status, terminal.text
        assert words in terminal.text


def test_a_flush_of_the_shared_store_is_said_to_concern_every_host() -> None:
    alone: dict[str, Any] = {"dram": {"blocks": 3}, "nvme": {"blocks": 4}}
    shared = {"tiers": {**alone, "shared": {"store": "valkey://kv:6379"}}}
    assert "host" not in flush.question({"tiers": alone}, "all", [], None)
    for tier, concerns_all in (("dram", False), ("all", True), ("shared", True)):
        assert ("EVERY host" in flush.question(shared, tier, ["9f3a"], "00112233" * 4)) is concerns_all


def test_the_log_says_who_flushed_what(run: Run, tmp_path: Path) -> None:
    pool = tiercache.Pool.from_blocks(np.zeros((4, 4096), np.uint8))
    chain = tiercache.KeyChain(tiercache.root_key("m"), 4, range(16)).packed()
    first, third = chain[:16], chain[32:48]
    names = []
    with tiercache.launch("16MiB", log=tmp_path / "log") as daemon:
        for engine, window in (("e", 0), ("tiercache/probe", 0), ("w", 2)):
            namespace = tiercache.NamespaceSpec(
                engine=engine, layout="x", dtype="uint8", block_size=4, block_bytes=4096, window_blocks=window
            )
            names.append(namespace.fingerprint()[:8])
            with tiercache.connect(daemon.address, namespace=namespace, pool=pool, required=True, name=engine) as one:
                one.store(chain, range(4))
                assert one.flush(tier="dram", key=third) == (1 if window else 2)
        for options in (("--prefix", first.hex()), ()):
            assert run("flush", "--yes", *options, "--address", daemon.address)[0] == 0
    log = (tmp_path / "log").read_text()
    me = f"pid {os.getpid()}, uid {os.geteuid()}"
    assert [line.partition("flush by ")[2] for line in log.splitlines() if "flush by" in line] == [
        f"e ({me}): block {third.hex()} and all that follow it of namespace 1 ({names[0]}), tier dram: "
        "2 blocks in DRAM, 0 on NVMe",
        f"w ({me}): block {third.hex()} of namespace 3 ({names[2]}), tier dram: 1 blocks in DRAM, 0 on NVMe",
        f"tiercache-cli ({me}): block {first.hex()} and all that follow it (in windowed namespaces only that block) "
        "of every namespace, tier all: 5 blocks in DRAM, 0 on NVMe",
        f"tiercache-cli ({me}): all blocks of every namespace, tier all: 2 blocks in DRAM, 0 on NVMe",
    ]


def test_namespaces_are_found_by_number_or_start_of_fingerprint() -> None:
    tree = {"namespaces": [{"id": 1, "fingerprint": "2abc"}, {"id": 2, "fingerprint": "2abd"}]}
    assert flush.find_namespace(tree, "2") == 2
    assert flush.find_namespace(tree, "2ABC") == 1
    with pytest.raises(ConfigError, match=r"2ab: is the start of 2 fingerprints: .* 1 \(2abc\), 2 \(2abd\)"):
        flush.find_namespace(tree, "2ab")
    for nothing in ("3", "", "9f"):
        with pytest.raises(ConfigError, match="no such namespace"):
            flush.find_namespace(tree, nothing)
