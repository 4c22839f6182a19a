"""How large the KV pool becomes, on a GPU of known size."""

from __future__ import annotations

import pytest
import torch

from tiercache.engine.memory import CPU_POOL_BYTES, count_pool_blocks, fit_model_len
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which the weights have 20."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60 * GIB, 80 * GIB))


@pytest.mark.usefixtures("gpu")
def test_weights_and_pool_share_what_the_utilization_allows() -> None:
    assert count_pool_blocks(EngineSettings(gpu_memory_utilization=0.5), 2 << 20, CUDA) == 20 * 512
    assert count_pool_blocks(EngineSettings(kv_cache_memory="1GiB"), 2 << 20, CUDA) == 512
    assert count_pool_blocks(EngineSettings(pool_blocks=7), 2 << 20, CUDA) == 7


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_full_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"would have 0 B, .* 2.0 MiB: raise gpu_memory_utilization, set"):
        count_pool_blocks(EngineSettings(gpu_memory_utilization=0.2), 2 << 20, CUDA)
    with pytest.raises(ConfigError, match=r"takes 61.0 GiB of memory and 60.0 GiB are free: lower kv_cache_memory"):
        count_pool_blocks(EngineSettings(kv_cache_memory="61GiB"), 2 << 20, CUDA)


def test_a_cpu_pool_has_a_size_of_its_own() -> None:
    assert count_pool_blocks(EngineSettings(), 1 << 20, CPU) == CPU_POOL_BYTES >> 20


def test_the_longest_sequence_is_what_model_and_pool_allow() -> None:
    def blocks_of(tokens: int) -> int:
        return -(-tokens // 16)

    assert fit_model_len(EngineSettings(), 4096, 1 << 20, 100, blocks_of) == 1600
    assert fit_model_len(EngineSettings(), 1024, 1 << 20, 100, blocks_of) == 1024
    assert fit_model_len(EngineSettings(max_model_len=1600), 1600, 1 << 20, 100, blocks_of) == 1600
    with pytest.raises(ConfigError, match="set max_model_len to 1600 at most, or raise kv_cache_memory to 101MiB"):
        fit_model_len(EngineSettings(max_model_len=1601), 1601, 1 << 20, 100, blocks_of)
