"""Connectors of one engine for several kinds of blocks, over one client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import BLOCK_BYTES, bytes_of, spec

import tiercache
from tiercache.errors import ConfigError, LayoutError

Open = Callable[..., tiercache.Connector]


def small_pool(block_bytes: int = 700) -> tiercache.Pool:
    """Blocks whose bytes begin those of larger ones, as blocks of a group of layers may."""
    rng = np.random.default_rng(5)
    return tiercache.Pool.from_blocks(rng.integers(0, 256, (16, 2 * block_bytes), np.uint8)[:, :block_bytes])


def test_siblings_store_and_load_their_own_blocks_and_match_together(open_connector: Open) -> None:
    first = open_connector()
    windowed = spec(700, group="window of siblings", window_blocks=2)
    sibling = first.sibling(windowed, small_pool())
    both, chain = [first.namespace, windowed], chain_of("siblings", 8)
    assert first.store(chain, range(8)).stored == 8
    assert first.match(chain, namespaces=both).blocks == 0
    assert sibling.store(chain, [4, 5], first=4).stored == 2
    match = first.match(chain, namespaces=both)
    assert match.blocks == 6  # the last cut behind a whole window
    assert first.prefetch(chain, namespaces=both) == 6
    expected = bytes_of(sibling, [4, 5])
    assert sibling.load(sibling.match(chain[: 6 * 16]), [9, 8], first=4) == 2
    assert bytes_of(sibling, [9, 8]) == expected
    first.release(match)
    assert first.client.report.counters()["stored_blocks"] == 10
    assert (first.counters["stored_blocks"], sibling.counters["stored_blocks"]) == (8, 2)


def test_a_sibling_ends_with_the_first_and_not_before(open_connector: Open) -> None:
    first = open_connector()
    sibling = first.sibling(spec(700, group="the other"), small_pool())
    chain = chain_of("ends", 2)
    sibling.close()
    assert first.available
    assert first.store(chain, [0, 1]).stored == 2
    other = first.sibling(spec(700, group="a third"), small_pool())
    first.close()
    assert not other.available
    assert other.match(chain).blocks == 0
    assert other.store_async(chain, [0, 1]).result(40).stored == 0


def test_a_sibling_whose_blocks_do_not_fit_is_refused(open_connector: Open) -> None:
    first = open_connector()
    with pytest.raises(LayoutError, match=f"has 700 bytes and the namespace says {BLOCK_BYTES}"):
        first.sibling(spec(), small_pool())
    with pytest.raises(ConfigError, match="window_blocks is -1"):
        first.sibling(spec(700, window_blocks=-1), small_pool())
