"""Engines for the tests: SGLang's tree, controller and pools from its own test kit, over tiercache."""

from __future__ import annotations

import json
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import TestCase

import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, drop_hicache_atexit_pin, match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

FULL = CacheConfig(page_size=16, components=(ComponentType.FULL,))
SWA = CacheConfig(page_size=4, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=16)
MAMBA = CacheConfig(
    page_size=64,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
    kv_size=1024,
    max_context_len=1024,
)
WAIT_S = 60.0


def save_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Files of a model that no test runs: they only have to name one."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
        "max_position_embeddings": 4096,
        "vocab_size": 128,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    (folder / "model.safetensors").write_bytes(bytes([seed]) * 64)
    return folder


class Engine(NamedTuple):
    """SGLang's cache of one engine, as its kit makes it."""

    tree: Any
    allocator: Any
    requests: Any

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    @property
    def backend(self) -> Any:
        """Tiercache, which may be wrapped in SGLang's injector of faults."""
        storage = self.controller.storage_backend
        return getattr(storage, "_backend", storage)


class _Kit(UnifiedRadixCacheStorageFixtures, TestCase):
    """SGLang's helpers for tests, outside of a test class."""

    def runTest(self) -> None:
        """There is none."""


class Rig:
    """Makes engines over one daemon, and drives them as SGLang's scheduler does."""

    def __init__(self, model: Path, address: str) -> None:
        self.model = model
        self.address = address
        self._stack = ExitStack()
        self._requests = 0
        self.kit = _Kit()

    def __enter__(self) -> Rig:
        self._stack.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        return self

    def __exit__(self, *_: object) -> None:
        self.kit.doCleanups()
        self._stack.close()

    def engine(
        self,
        cfg: CacheConfig = FULL,
        *,
        layout: str = "page_first",
        mode: str = "cache",
        policy: str = "wait_complete",
        model: Path | None = None,
        prefix_keys: bool = True,
        named: bool = True,
        arguments: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Engine:
        """An engine with the connector; `settings` are those of the connector."""
        extra = {
            "backend_name": "tiercache",
            "module_path": "tiercache.connectors.sglang_hicache",
            "class_name": "TierCacheHiCache",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": prefix_keys,
            "prefetch_threshold": 1,
            "address": self.address,
            "request_timeout_s": 8.0,  # a busy machine is not a defect
            **settings,
        }
        self.kit.cfg = cfg
        engine = Engine(*build_fixture(cfg))
        server_args = ServerArgs(
            model_path=str(model or self.model),
            device="cpu",
            page_size=cfg.page_size,
            hicache_io_backend="kernel",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy=policy,
            hicache_host_memory_mode=mode,
            **(arguments or {}),
        )
        server_args._mamba_cache_chunk_size = max(CHUNK_SIZE, cfg.page_size)
        set_global_server_args_for_scheduler(server_args)
        tree = engine.tree
        tree.init_hicache(server_args, tree.cache_init_params)
        self.kit.addCleanup(tree.shutdown)
        self.kit.addCleanup(drop_hicache_atexit_pin, tree)
        tree.write_through_threshold = 1 << 30  # the tests say what is backed up
        tree.load_back_threshold = 0
        controller = engine.controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        if named and engine.backend.names is not None:
            assert engine.backend.names.wait(WAIT_S)
        return engine

    # --- what an engine does ---------------------------------------------------------------------

    def tokens(self, pages: int, cfg: CacheConfig = FULL, start: int = 1) -> list[int]:
        return list(range(start, start + pages * cfg.page_size))

    def compute(self, engine: Engine, tokens: list[int], seed: int = 1) -> None:
        """Put tokens into the tree, with random KV in every layer of every pool."""
        self.kit._insert(engine.tree, engine.allocator, engine.requests, tokens)  # rule: of SGLang's kit
        generator = torch.Generator().manual_seed(seed)
        for buffer, at in _places(engine, tokens):
            buffer[at] = torch.rand(buffer[at].shape, generator=generator).to(buffer.dtype)

    def contents(self, engine: Engine, tokens: list[int]) -> list[torch.Tensor]:
        """What the device has of these tokens: each layer's K and V, and states."""
        return [buffer[at].clone() for buffer, at in _places(engine, tokens)]

    def store(self, engine: Engine, tokens: list[int]) -> None:
        """Have SGLang back up what it has of tokens: to its host memory, and from there to storage."""
        node = match_prefix(engine.tree, tokens).last_device_node
        if engine.tree.buffer_pipeline is not None:
            self.kit._buffer_backup_and_wait(engine.tree, node)
            return
        self.kit._backup_node(engine.tree, node)
        self.kit._write_path_to_l3(engine.tree, node)
        self.kit._flush_l3_backups(engine.tree, WAIT_S)

    def prefetch(self, engine: Engine, tokens: list[int]) -> int:
        """Ask for tokens as SGLang's scheduler does for a request; returns how many the device then has."""
        self._requests += 1
        request = CacheRequestHandle(f"request {self._requests}", 0)
        tree = engine.tree
        match = match_prefix(tree, tokens)
        anchor, known = match.last_host_node, match.device_prefix_len + match.host_hit_length
        if tree.buffer_pipeline is not None and tree.is_root(anchor):
            anchor = match.last_device_node
        prefix = tree.get_prefix_hash_values(anchor) if tree.hicache_storage_pass_prefix_keys else None
        tree.prefetch_from_storage(
            request,
            anchor,
            array("q", tokens[known:]),
            tree.get_last_hash_value(anchor),
            prefix,
            matched_prefix_tokens=tokens[:known],
        )
        self.kit._run_prefetch_to_completion(tree, request, WAIT_S)
        match = match_prefix(tree, tokens)
        if tree.buffer_pipeline is None and match.host_hit_length:
            self.kit._load_back_through_admission(tree, engine.requests, tokens)
            self.kit._finish_pending_loads(tree)
            match = match_prefix(tree, tokens)
        return int(match.device_prefix_len)


def _places(engine: Engine, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Buffers of the device, and where in them these tokens are: of windows and states only what SGLang needs."""
    node = match_prefix(engine.tree, tokens).last_device_node
    at = engine.tree.path_device_indices(node)
    kv = engine.allocator.get_kvcache()
    full = getattr(kv, "full_kv_pool", kv)
    places = [(buffer, at) for buffer in (*full.k_buffer, *full.v_buffer)]
    if ComponentType.SWA in engine.tree.components:
        window = engine.tree.components[ComponentType.SWA].sliding_window_size
        at_swa = engine.allocator.full_to_swa_index_mapping[at][-window:]
        assert bool((at_swa > 0).all())
        places += [(buffer, at_swa) for buffer in (*kv.swa_kv_pool.k_buffer, *kv.swa_kv_pool.v_buffer)]
    if ComponentType.MAMBA in engine.tree.components:
        state = engine.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        cache = engine.requests.mamba_pool.mamba_cache
        places += [(buffer.transpose(0, 1), state) for buffer in (*cache.conv, cache.temporal)]
    return places
