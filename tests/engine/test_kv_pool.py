"""Which layers share a block, and what that makes of pool sizes."""

from __future__ import annotations

import pytest
import torch

from tiercache.engine.kv_pool import MAX_GROUPS, choose_block_layers, count_pool_blocks, fit_model_len, group_layers
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
SETTINGS = EngineSettings(block_size=4, chunk_size=8, max_num_seqs=4)


def test_no_cut_loses_more_than_a_fifth_or_makes_too_many_groups() -> None:
    for full in range(1, 40):
        for windowed in range(1, 40):
            layers = choose_block_layers(full, windowed)
            if layers is None:
                continue
            groups = -(-full // layers) + -(-windowed // layers)
            assert groups <= MAX_GROUPS
            assert 5 * (groups * layers - full - windowed) <= groups * layers
            assert -(-full // layers) * layers < full + windowed


def test_a_pool_holds_what_all_groups_need() -> None:
    groups = group_layers((9, 0), 1000, SETTINGS)

    def blocks_of(tokens: int) -> int:
        return groups.most_blocks(tokens, SETTINGS)

    most = groups.windows[1].most_blocks(SETTINGS)
    assert most == 2 + 3 + 1
    assert [blocks_of(tokens) for tokens in (1, 4, 5, 24, 25, 400)] == [2, 2, 4, 12, 13, 100 + most]
    assert fit_model_len(SETTINGS, 400, 1 << 20, 106, blocks_of) == 400
    assert fit_model_len(SETTINGS, 400, 1 << 20, 105, blocks_of) == 396
    assert fit_model_len(SETTINGS, 400, 1 << 20, 7, blocks_of) == 12
    longer = EngineSettings(block_size=4, chunk_size=8, max_num_seqs=4, max_model_len=400)
    with pytest.raises(ConfigError, match=r"the KV pool holds 396 tokens.* raise kv_cache_memory to 106MiB"):
        fit_model_len(longer, 400, 1 << 20, 105, blocks_of)
    with pytest.raises(ConfigError, match="has 1 blocks, and a sequence of one token takes 2, one for each group"):
        fit_model_len(SETTINGS, 400, 1 << 20, 1, blocks_of)


@pytest.mark.parametrize(("longest", "sizes"), [(10, [0]), (11, [0, 10])])
def test_a_window_that_no_sequence_outgrows_is_none(longest: int, sizes: list[int]) -> None:
    assert [window.size for window in group_layers((10, 0), longest, SETTINGS).windows] == sizes


GIB = 1 << 30
CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which the weights have 20."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60 * GIB, 80 * GIB))


@pytest.mark.usefixtures("gpu")
def test_weights_and_pool_share_what_the_utilization_allows() -> None:
    assert count_pool_blocks(EngineSettings(gpu_memory_utilization=0.5), 2 << 20, CUDA) == 20 * 512
    assert count_pool_blocks(EngineSettings(kv_cache_memory="1GiB"), 2 << 20, CUDA) == 512
    assert count_pool_blocks(EngineSettings(kv_cache_memory="1GiB"), 2 << 20, CUDA, tail_bytes=4 << 20) == 510
    assert count_pool_blocks(EngineSettings(pool_blocks=7), 2 << 20, CUDA, tail_bytes=4 << 20) == 7


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_full_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"would have 0 B, .* 2.0 MiB: raise gpu_memory_utilization, set"):
        count_pool_blocks(EngineSettings(gpu_memory_utilization=0.2), 2 << 20, CUDA)
    with pytest.raises(ConfigError, match=r"takes 61.0 GiB of memory and 60.0 GiB are free: lower kv_cache_memory"):
        count_pool_blocks(EngineSettings(kv_cache_memory="61GiB"), 2 << 20, CUDA)
