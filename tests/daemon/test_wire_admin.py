"""Requests of operators, as `daemon/PROTOCOL.md` has them: inspect, pins, specs, the use of namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_client import VISIBLE, Client, block_of, daemon, new_chain, new_spec
from waiting import wait_until


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("admin") / "run"
    nvme = ["--nvme", str(path.parent / "kv"), "--nvme-size", "64MiB", "--nvme-segment", "8MiB"]
    with daemon(path, "--arena", "16MiB", "--region", "8MiB", "--pin-share", "0.25", *nvme):
        yield path


@pytest.fixture
def client(run_dir: Path) -> Iterator[Client]:
    with Client(run_dir) as connected:
        connected.await_arena()
        yield connected


def store(client: Client, number: int, keys: bytes) -> None:
    blocks = [block_of(place) for place in range(len(keys) // 16)]
    assert client.store(number, keys, blocks) == [VISIBLE] * len(blocks)


def test_a_block_is_inspected_in_every_place(client: Client, run_dir: Path) -> None:
    one, two, keys = client.namespace(), client.namespace(), new_chain(3)
    store(client, one, keys)
    store(client, two, keys[:32])
    before = client.stats()["counters"]

    def places(number: int, key: bytes) -> list[list[Any]]:
        tag, views, _, chain = client.ask("inspect", [number], key)
        assert (tag, chain) == ("inspected", b"")
        return list(views)

    wait_until(lambda: len(places(one, keys[32:])) == 2)  # written to NVMe in the background, after its parents
    dram, nvme = places(one, keys[16:32])
    assert dram[:8] == [one, "dram", "", 8192, 1, 0, "", ""]
    assert 0 <= dram[8] < 60
    assert nvme == [one, "nvme", str(run_dir.parent / "kv"), 8192, 1, 0, "raw", "xxh3", None]
    _, views, depth, chain = client.ask("inspect", [], keys[16:32], True)
    assert sorted((view[0], view[1]) for view in views if view[1] == "dram") == [(one, "dram"), (two, "dram")]
    assert (depth, chain) == (2, keys[:32])
    assert client.ask("inspect", [two], keys[32:], True) == ["inspected", [], 0, b""]
    _, lease, _ = client.match([one], keys)
    assert places(one, keys[32:])[0][5] >= 1, "the lease pins the deepest block"
    wait_until(lambda: places(one, keys[32:])[0][5] == 1)  # the daemon no longer expects a client to continue the chain
    assert client.release(lease)
    after = client.stats()["counters"]
    assert after["match_requests"] == before["match_requests"] + 1, "an inspection does not count as a request"
    assert client.refusal("inspect", [one], keys) == "too_large"
    assert client.refusal("inspect", [4000], keys[:16]) == "unknown_namespace"


def test_a_chain_is_known_where_it_is_on_nvme_only(client: Client) -> None:
    number, keys = client.namespace(), new_chain(4)
    store(client, number, keys)
    wait_until(lambda: len(client.ask("inspect", [number], keys[48:])[1]) == 2)
    client.ask("flush", "dram", [number], b"")
    _, views, depth, chain = client.ask("inspect", [number], keys[48:], True)
    assert ([view[1] for view in views], depth, chain) == (["nvme"], 4, keys)
    mine = next(one for one in client.stats()["namespaces"] if one["id"] == number)
    assert (mine["blocks"], mine["below_blocks"]) == (0, 4)


def test_pins_are_listed_and_ended_by_their_last_key(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    store(client, number, keys)
    assert client.ask("pins") == ["pin_list", [], 0, 4 << 20]
    assert client.ask("pin", [number], keys, 60_000) == ["pinned", 3]
    _, [pin], count, _ = client.ask("pins")
    assert (pin[:4], count) == ([[number], keys[32:], 3, 3 * 8192], 1)
    assert 0 < pin[4] <= 60_000
    mine = next(one for one in client.stats()["namespaces"] if one["id"] == number)
    assert mine["pinned_blocks"] == 3
    assert client.ask("unpin", [number], keys[32:]) == ["pinned", 3]
    assert client.ask("pins")[1:3] == [[], 0]


def test_specs_come_in_full(client: Client) -> None:
    spec = new_spec(8192, head_dim=64, extra={"rope": "yarn"})
    number = client.ask("register_namespace", spec)[1]
    tag, specs = client.ask("specs", [number])
    assert (tag, set(specs)) == ("spec_list", {number})
    assert {name: specs[number][name] for name in spec} == spec
    assert client.refusal("specs", []) == "bad_value"
