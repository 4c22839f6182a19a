"""What a window needs, and the most that a sequence with one holds."""

from __future__ import annotations

from typing import Any

import pytest

from tiercache.engine import EngineSettings
from tiercache.engine.memory import fit_model_len
from tiercache.engine.window import Window
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
SETTINGS: dict[str, Any] = {"block_size": 8, "chunk_size": 32, "pool_blocks": 16, "max_num_seqs": 4}


def test_a_cut_needs_the_blocks_that_its_token_sees() -> None:
    window = Window(block_size=4, size=10)
    assert [window.needed(cut) for cut in (0, 1, 2, 3, 4, 8)] == [[], [0], [0, 1], [0, 1, 2], [1, 2, 3], [5, 6, 7]]
    assert max(len(window.needed(cut)) for cut in range(50)) == window.blocks == 3
    sinks = Window(block_size=4, size=10, sinks=4)
    assert [sinks.needed(cut) for cut in (3, 4, 5, 8)] == [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 5, 6, 7]]
    assert sinks.blocks == 4
    assert Window(block_size=4).needed(3) == [0, 1, 2]


def test_a_pool_that_holds_a_window_and_a_step_serves_any_length() -> None:
    settings, window = EngineSettings(**SETTINGS), Window(8, 24)
    most = window.most_blocks(settings)
    assert most == 3 + 5 + 1  # 24 tokens, 32 of a chunk, 4 decoding sequences, and those that do not begin with a block

    def blocks_of(tokens: int) -> int:
        return window.most_blocks_of(tokens, settings)

    assert fit_model_len(settings, 32_000, 1 << 20, most, blocks_of) == 32_000
    assert fit_model_len(settings, 32_000, 1 << 20, most - 1, blocks_of) == (most - 1) * 8
    assert window.most_blocks(EngineSettings(**SETTINGS, enable_chunked_prefill=False)) is None
    with pytest.raises(ConfigError, match=r"max_model_len is 500 and the KV pool holds 64 tokens.*pool_blocks to 9"):
        fit_model_len(EngineSettings(**SETTINGS, max_model_len=500), 500, 1 << 20, 8, blocks_of)
