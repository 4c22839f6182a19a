"""Hints as `daemon/PROTOCOL.md` has them, and malformed ones."""

from __future__ import annotations

from typing import Any

import pytest
from raw_client import VISIBLE, Client, block_of, new_chain
from waiting import wait_until


def stored(client: Client, blocks: int) -> tuple[int, bytes]:
    """A namespace, and a chain of so many blocks in it."""
    number, keys = client.namespace(), new_chain(blocks)
    assert client.store(number, keys, [block_of(place) for place in range(blocks)]) == [VISIBLE] * blocks
    return number, keys


def test_a_hint_takes_effect(client: Client) -> None:
    number, keys = stored(client, 3)
    other = stored(client, 1)
    assert client.ask("hint", [number], keys + new_chain(1)) == ["hinted", 3], "an empty hint changes nothing"
    assert client.ask("hint", [number], keys, 1, False, 0, 50) == ["hinted", 3]
    wait_until(lambda: client.ask("peek", [number], keys)[1] == 1)
    assert client.ask("peek", [other[0]], other[1])[1] == 1
    assert client.ask("hint", [number], keys, 0, True) == ["hinted", 1]
    assert client.ask("hint", [number], keys, 0, False, 1000, 0, 3) == ["hinted", 1]


@pytest.mark.parametrize(
    "fields",
    [
        [-1],
        [-(2**63)],
        [0, False, -1],
        [0, False, 0, -5],
        [0, False, 0, 0, -1],
        [0, False, 0, 0, 4],
        [0, False, 0, 0, 2**62],
        [0, True, 10],
    ],
)
def test_values_out_of_range_are_refused(client: Client, fields: list[Any]) -> None:
    number, keys = stored(client, 1)
    assert client.refusal("hint", [number], keys, *fields) == "bad_value"
    assert client.ask("peek", [number], keys)[1] == 1


@pytest.mark.parametrize(
    "fields",
    [
        [1.5],
        [None],
        [0, 1],
        [0, False, float("nan")],
        [0, False, float("inf")],
        [0, False, 0, "1"],
        [0, False, 0, 0, None],
        [2**64 - 1 + 0.0],
    ],
)
def test_values_of_other_types_are_malformed(client: Client, fields: list[Any]) -> None:
    number, keys = stored(client, 1)
    assert client.refusal("hint", [number], keys, *fields) == "malformed"
