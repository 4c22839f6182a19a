"""The affinity query names blocks as vLLM does, and says what vLLM then finds."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from tiercache.connectors.vllm.names import ENCODINGS, block_hashes, hash_seed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENS = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 151_935, 2**31 - 1, *range(90)]


@pytest.mark.parametrize("seed", [None, "7"])
@pytest.mark.parametrize("algorithm", sorted(ENCODINGS))
@pytest.mark.parametrize(
    "more", [{}, {"cache_salt": "tenant"}, {"lora_request": LoRARequest("sql", 1, "/adapters/sql")}], ids=str
)
def test_hashes_are_those_of_vllm(
    algorithm: str, seed: str | None, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    for name in ("NONE_HASH", "_NONE_HASH_SEED"):
        monkeypatch.setattr(kv_cache_utils, name, None, raising=False)
    hash_function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    assert hash_seed(algorithm) == kv_cache_utils.NONE_HASH
    hasher = kv_cache_utils.get_request_block_hasher(16, hash_function)
    request = Request("r", TOKENS, SamplingParams(), None, block_hasher=hasher, **more)
    lora = more.get("lora_request")
    adapter = (lora.lora_name, lora.lora_path) if lora else None
    salt = str(more.get("cache_salt", ""))
    assert len(request.block_hashes) == 6
    assert block_hashes(algorithm, hash_seed(algorithm), TOKENS, 16, adapter, salt) == request.block_hashes
