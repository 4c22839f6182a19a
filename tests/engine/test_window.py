"""What a window needs, and the most that a sequence with one holds."""

from __future__ import annotations

from typing import Any

import pytest
from plain_model import Watch, plain_engine, plain_prompt, said

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


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17])
def test_no_block_leaves_before_its_last_token_is_out_of_sight(size: int) -> None:
    window = Window(block_size=8, size=size)
    for computed in range(1, 100):
        assert window.first_block(computed) == max(0, computed - size + 1) // 8


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


def test_a_prompt_that_may_not_be_cut_needs_room_for_all_of_it() -> None:
    with plain_engine(window=7, enable_chunked_prefill=False) as engine:
        assert engine.max_model_len == 32
        assert Watch(engine).serve(plain_prompt(25), 7).tokens == said(engine, plain_prompt(25), 7)
