"""What a later release may add to the protocol: fields that this one does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from raw_client import VISIBLE, Client, daemon, new_spec
from waiting import wait_until


def _number(client: Client, spec: dict[str, object]) -> int:
    tag, number, frame_bytes = client.ask("register_namespace", spec)
    assert (tag, frame_bytes) == ("namespace", 4096)
    return int(number)


def test_specs_that_differ_in_unknown_fields_are_different_namespaces(client: Client) -> None:
    """Dropping such a field would give clients of one form the blocks of another."""
    plain = new_spec(4096, engine="evolution")
    later = [
        {**plain, "sink_tokens": 4},
        {**plain, "sink_tokens": 5},
        {**plain, "sink_tokens": "4"},
        {**plain, "sink_tokens": b"4"},
        {**plain, "sink_tokens": None},
        {**plain, "sinks": {"b": 1, "a": [2, 3]}},
        {**plain, "sink_tokens": 4, "other": 1},
    ]
    numbers = [_number(client, spec) for spec in (plain, *later)]
    assert len(set(numbers)) == len(numbers)
    assert [_number(client, spec) for spec in (plain, *later)] == numbers
    assert _number(client, {**plain, "sinks": {"a": [2, 3], "b": 1}}) == numbers[6], "the order of keys does not matter"


@pytest.mark.parametrize("later", [{1: 2}, {"later": {1: 2}}, {"later": [{b"a": 1}]}, {None: 1}])
def test_a_spec_with_keys_that_are_no_names_is_the_clients_fault(client: Client, later: dict[object, object]) -> None:
    """Such fields could be written in more than one way; refusing them is no failure of the daemon."""
    failed = client.stats()["counters"]["requests_failed"]
    assert client.refusal("register_namespace", {**new_spec(4096), **later}) == "malformed"
    assert client.stats()["counters"]["requests_failed"] == failed


def test_blocks_of_a_later_form_are_found_again_after_a_restart(tmp_path: Path) -> None:
    """Blocks of the plain form are not taken for those of the later one."""
    flags = ("--arena", "8MiB", "--region", "2MiB", "--nvme", str(tmp_path / "nvme"), "--nvme-size", "64MiB")
    flags += ("--nvme-segment", "4MiB")
    plain, key = new_spec(4096, engine="restart"), b"r" * 16
    later = {**plain, "sink_tokens": 4}
    with daemon(tmp_path / "run", *flags), Client(tmp_path / "run") as client:
        client.await_arena()
        wait_until(lambda: not client.stats()["health"]["reasons"])
        number = _number(client, later)
        lease = client.ask("reserve", number, b"", key, 5000)[1]
        assert client.ask("commit", lease, bytes(4))[1] == bytes([VISIBLE])
        wait_until(lambda: client.stats()["tiers"]["nvme"]["blocks"] == 1)
    with daemon(tmp_path / "run", *flags), Client(tmp_path / "run") as client:
        wait_until(lambda: client.stats()["tiers"]["nvme"]["blocks"] == 1)
        assert client.ask("peek", [_number(client, later)], key)[1:3] == [0, 1]
        assert client.ask("peek", [_number(client, plain)], key)[1:3] == [0, 0]
