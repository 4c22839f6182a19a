"""The backend by itself: whose pages are whose, and what it makes of what it cannot serve."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang_rig import WAIT_S, Rig, save_model

from tiercache.connector.connector import Connector
from tiercache.connectors.sglang import engine
from tiercache.connectors.sglang_hicache import TierCacheHiCache

PAGE = 16
AFTER_NOTHING = HiCacheStorageExtraInfo(prefix_keys=[])


def hashes(first: int, count: int) -> list[str]:
    return [hashlib.sha256(b"%d" % number).hexdigest() for number in range(first, first + count)]


DEVICE_POOL: dict[str, Any] = {
    "size": 256,
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "layer_num": 3,
    "device": "cpu",
    "enable_memory_saver": False,
}


def mla_host(layout: str = "page_first") -> Any:
    return host_of(MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **DEVICE_POOL), layout)


def mha_host(layout: str = "page_first") -> Any:
    return host_of(MHATokenToKVPool(head_num=2, head_dim=32, **DEVICE_POOL), layout)


def host_of(pool: Any, layout: str) -> Any:
    host = _build_mha_mla_host_pool(
        pool=pool,
        host_to_device_ratio=1.5,
        page_size=PAGE,
        layout=layout,
        allocator_type="default",
        pool_label="kv",
    )
    host.kv_buffer.view(torch.uint8).copy_(torch.randint(0, 255, host.kv_buffer.view(torch.uint8).shape))
    return host


class Backends:
    """Makes backends without a tree: a rank each."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        rig.engine()  # sets the arguments of the server
        self.made: list[TierCacheHiCache] = []
        # One process stands for all ranks, and each for an engine that is just starting.
        monkeypatch.setattr(engine.BackendMaker, "starting", True)
        extra = {"interface_v1": 1, "address": rig.address, "request_timeout_s": 8.0}
        self.config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "model", extra_config=extra)

    def make(self, host: Any, others: dict[str, Any] | None = None, **config: Any) -> TierCacheHiCache:
        backend = TierCacheHiCache(dataclasses.replace(self.config, **config), {})
        self.made.append(backend)
        backend.register_mem_pool_host(host)
        for name, other in {PoolName.KV: host, **(others or {})}.items():
            backend.register_mem_host_pool_v2(other, name)
        backend.on_host_pools_registered()
        assert backend.names is not None
        assert backend.names.wait(WAIT_S)
        return backend


@pytest.fixture
def backends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Any:
    backends = Backends(rig, monkeypatch)
    yield backends
    for backend in backends.made:
        backend.close()


def places(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def bytes_of(host: Any, page: int) -> bytes:
    return bytes(host.get_data_page(page * PAGE, flat=True).contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("make_host", [mha_host, mla_host])
def test_pages_go_to_other_places_byte_for_byte(backends: Backends, make_host: Any, layout: str) -> None:
    host = make_host(layout)
    backend = backends.make(host)
    wanted = [bytes_of(host, page) for page in (1, 2, 3)]
    others = [bytes_of(host, page) for page in (0, 4, 8, 10)]
    assert backend.batch_set_v1(hashes(0, 3), places(1, 2, 3), AFTER_NOTHING) == [True] * 3
    assert backend.batch_get_v1(hashes(0, 4), places(9, 5, 7, 6)) == [True, True, True, False]
    assert [bytes_of(host, page) for page in (9, 5, 7)] == wanted
    assert [bytes_of(host, page) for page in (0, 4, 8, 10)] == others


def test_a_wrong_prefix_costs_hits_and_no_bytes(backends: Backends) -> None:
    host = mha_host()
    backend = backends.make(host)
    assert backend.batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert backend.batch_set_v1(hashes(100, 2), places(2, 3), HiCacheStorageExtraInfo(hashes(0, 1))) == [True] * 2
    # The chain that is asked for goes 0, 1, 100, 101; what is stored, 0, 100, 101.
    before = {page: bytes_of(host, page) for page in range(4)}
    result = backend.batch_get_v1([*hashes(0, 2), *hashes(100, 2)], places(8, 9, 10, 11))
    good = result.index(False) if False in result else 4
    assert [bytes_of(host, 8 + page) for page in range(good)] == [before[page] for page in range(good)]


def test_ranks_keep_their_shards_apart(backends: Backends) -> None:
    ranks = [backends.make(mha_host(), tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert ranks[0].batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert ranks[1].batch_exists(hashes(0, 2)) == 0
    assert ranks[0].batch_exists(hashes(0, 2)) == 2
    assert backends.make(mha_host()).batch_exists(hashes(0, 2)) == 0
    assert backends.make(mha_host(), pp_rank=0, pp_size=2, tp_size=2).batch_exists(hashes(0, 2)) == 0
    assert backends.make(mha_host(), attn_cp_size=2, tp_size=2).batch_exists(hashes(0, 2)) == 0


def test_pages_of_mla_are_stored_by_one_rank_and_found_by_all(backends: Backends) -> None:
    hosts = [mla_host(), mla_host()]
    ranks = [backends.make(hosts[rank], tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)]
    assert ranks[1].batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert ranks[0].batch_exists(hashes(0, 2)) == 0, "the second rank stores nothing"
    assert ranks[0].batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert ranks[1].batch_get_v1(hashes(0, 2), places(5, 6)) == [True] * 2
    assert [bytes_of(hosts[1], page) for page in (5, 6)] == [bytes_of(hosts[0], page) for page in (0, 1)]


def test_an_indexer_shares_the_fate_of_its_pages(backends: Backends) -> None:
    host, indexer = mla_host(), mla_host()
    backend = backends.make(host, {PoolName.INDEXER: indexer})
    index = PoolTransfer(name=PoolName.INDEXER, keys=hashes(0, 2), host_indices=places(0, 1))
    assert backend.batch_set_v1(hashes(0, 3), places(0, 1, 2), AFTER_NOTHING) == [True] * 3
    assert backend.batch_exists_v2(hashes(0, 3), [index]).kv_hit_pages == 0
    assert backend.batch_set_v2([index], AFTER_NOTHING) == {"indexer": [True] * 2}
    found = backend.batch_exists_v2(hashes(0, 3), [index])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {"kv": 2, "indexer": 2})
    wanted = [bytes_of(indexer, page) for page in (0, 1)]
    assert backend.batch_get_v2([dataclasses.replace(index, host_indices=places(7, 8))]) == {"indexer": [True] * 2}
    assert [bytes_of(indexer, page) for page in (7, 8)] == wanted


def test_places_that_are_no_whole_pages_are_misses(backends: Backends) -> None:
    backend = backends.make(mha_host())
    assert backend.batch_set_v1(hashes(0, 2), torch.arange(8, 8 + 2 * PAGE), AFTER_NOTHING) == [False] * 2
    assert backend.batch_set_v1(hashes(0, 2), places(0), AFTER_NOTHING) == [False] * 2
    assert backend.batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert backend.batch_get_v1(hashes(0, 2), torch.arange(8, 8 + 2 * PAGE)) == [False] * 2
    assert backend.batch_get_v1(hashes(0, 2), places(3, 3)) == [False] * 2
    assert backend.batch_get_v1(["no hash"], places(3)) == [False]


def test_pages_that_are_stored_after_the_start_are_of_unknown_weights(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that an operator attaches later: the weights may have been updated meanwhile."""
    backends.make(mha_host()).batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING)
    monkeypatch.setattr(engine.BackendMaker, "starting", False)
    host = mha_host()
    later = backends.make(host)
    assert later.batch_exists(hashes(0, 2)) == 0
    assert later.batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
    assert later.batch_exists(hashes(0, 2)) == 2
    host.clear()  # a flush: pages from before the attachment may have been of other weights
    assert later.batch_exists(hashes(0, 2)) == 0


def test_pages_of_a_model_that_takes_images_are_for_one_engine(backends: Backends, model: Path, tmp_path: Path) -> None:
    """SGLang names an image by 30 bits in the place of its tokens."""
    seen = save_model(tmp_path / "images", architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl")
    for media_ids, found in (("engine", 0), ("content", 2)):
        set_global_server_args_for_scheduler(ServerArgs(model_path=str(seen), device="cpu"))
        extra = {**backends.config.extra_config, "media_ids": media_ids}
        first, second = (backends.make(mha_host(), extra_config=extra) for _ in range(2))
        assert first.batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [True] * 2
        assert first.batch_exists(hashes(0, 2)) == 2
        assert second.batch_exists(hashes(0, 2)) == found


def test_the_content_of_adapters_at_the_start_is_in_the_name(backends: Backends, model: Path, tmp_path: Path) -> None:
    """SGLang names these by name and path alone."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    found = []
    for content in (b"one", b"other", b"one"):
        (adapter / "adapter_model.safetensors").write_bytes(content)
        arguments = ServerArgs(model_path=str(model), device="cpu")
        arguments.lora_paths = [LoRARef(lora_name="mine", lora_path=str(adapter))]
        set_global_server_args_for_scheduler(arguments)
        backend = backends.make(mha_host())
        found.append(backend.batch_exists(hashes(0, 2)))
        backend.batch_set_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING)
    assert found == [0, 0, 2]


@pytest.mark.parametrize(("policy", "limit_s"), [("timeout", 1.5), ("wait_complete", 8.0)])
def test_a_load_takes_no_longer_than_sglang_waits(
    backends: Backends, monkeypatch: pytest.MonkeyPatch, policy: str, limit_s: float
) -> None:
    backend = backends.make(mha_host())
    tree = SimpleNamespace(prefetch_stop_policy=policy, prefetch_timeout_base=1.0, prefetch_timeout_per_page=0.25)
    backend.maker = engine.BackendMaker(tree, True)
    limits: list[float] = []

    def load(*arguments: Any, timeout_s: float, **options: Any) -> int:
        limits.append(timeout_s)
        return 0

    monkeypatch.setattr(Connector, "load", load)
    assert backend.batch_get_v1(hashes(0, 2), places(0, 1), AFTER_NOTHING) == [False] * 2
    assert limits == [limit_s]
