"""`tiercache flush`: what it asks before, whom it concerns, and what it says after."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import COMMAND, Run, assert_refused
from terminal import Terminal

import tiercache
from tiercache.cli import flush
from tiercache.errors import ConfigError


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
    assert "host" not in flush.question({"tiers": alone}, "all", None, None)
    for tier, concerns_all in (("dram", False), ("all", True), ("shared", True)):
        assert ("EVERY host" in flush.question(shared, tier, "9f3a", "00112233" * 4)) is concerns_all


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
