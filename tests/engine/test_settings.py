from __future__ import annotations

from typing import Any

import pytest

from tiercache.engine import EngineSettings
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"block_size": 0}, "block_size is 0: must be at least 1"),
        ({"chunk_size": 40, "block_size": 16}, "chunk_size is 40: must be a multiple of block_size 16"),
        ({"write": "never"}, "write is 'never': must be one of through, back"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3': must be one of auto, fp8, fp8_e4m3"),
        ({"kv_cache_memory": "many"}, "kv_cache_memory 'many' is not understood: write for example 16GiB"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens is 512: must be at least 576, a chunk_size of"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5: must be above 0 and at most 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: this engine runs on one device; set it to 1"),
        ({"load_timeout_s": 0.0}, "load_timeout_s is 0.0: must be above 0"),
        ({"kv_cache_dtype": "fp8", "tier_dtype": "int8"}, "set one of the two to 'auto'"),
        ({"attention_window": 20, "attention_sinks": 0}, "attention_sinks is 0: must be at least 1"),
        ({"clean_blocks": -1}, "clean_blocks is -1: must be 0 or more"),
    ],
)
def test_wrong_settings_are_named(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineSettings(**setting)
