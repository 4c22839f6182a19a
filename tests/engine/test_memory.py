"""How large the KV pool becomes, on a GPU of known size."""

from __future__ import annotations

import pytest
import torch

from tiercache.engine.memory import count_pool_blocks
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
    assert count_pool_blocks(EngineSettings(kv_cache_memory="1GiB"), 2 << 20, CUDA, tail_bytes=4 << 20) == 510
    assert count_pool_blocks(EngineSettings(pool_blocks=7), 2 << 20, CUDA, tail_bytes=4 << 20) == 7


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_full_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"would have 0 B, .* 2.0 MiB: raise gpu_memory_utilization, set"):
        count_pool_blocks(EngineSettings(gpu_memory_utilization=0.2), 2 << 20, CUDA)
    with pytest.raises(ConfigError, match=r"takes 61.0 GiB of memory and 60.0 GiB are free: lower kv_cache_memory"):
        count_pool_blocks(EngineSettings(kv_cache_memory="61GiB"), 2 << 20, CUDA)
