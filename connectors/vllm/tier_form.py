"""Namespaces for the rows of vLLM's own offload memory, and checks of what cannot be served from it.

A row is one chunk of one KV cache group: the blocks of all workers, one after another. vLLM tells a tier how long a row
is, and little of what determines the meaning of its bytes; the rest is in the configuration of the engine that makes
the tier.
"""

from __future__ import annotations

import hashlib
import platform
from typing import Any, NamedTuple

import torch

from tiercache.errors import ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from .callers import locals_of_callers
from .compat import VERSION, window_in_chunks
from .groups import GroupPart, check_groups, check_steps, layer_specs, parts_of
from .names import check_hashes


class Caller(NamedTuple):
    """The engine that makes a tier: its configuration, that of its KV caches, and its offloading scheduler."""

    vllm_config: Any
    kv_cache_config: Any
    scheduler: Any

    def request(self, request_id: str) -> Any:
        """vLLM's request of this id, or None: a tier is given no more than the id."""
        status = getattr(self.scheduler, "_req_status", {}).get(request_id)
        return getattr(status, "req", None)


def engine_of_caller() -> Caller:
    """The engine that is making a tier.

    vLLM gives a tier neither configuration: it gives the model's name, which says nothing of weights, revision or
    overrides. But it makes a tier from the constructor of a scheduler that has been given both, so they are on the
    stack, and so is the scheduler. Raises ModelRefused where they are not.
    """
    for known in locals_of_callers():
        vllm_config, kv_cache_config = known.get("vllm_config"), known.get("kv_cache_config")
        if isinstance(vllm_config, VllmConfig) and isinstance(kv_cache_config, KVCacheConfig):
            return Caller(vllm_config, kv_cache_config, known.get("self"))
    raise ModelRefused("this vLLM does not show which model a tier is for: use TierCacheConnector")


def make_namespaces(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int
) -> list[tuple[GroupPart, NamespaceSpec]]:
    """The parts of the KV cache groups, in chunks, and the namespace of each.

    Raises ModelRefused for what cannot be named or served.

    Args:
        offloading: vLLM's OffloadingConfig.
        row_bytes: length of a row of the offload memory.
    """
    check_hashes(vllm_config)
    unit = check_groups(vllm_config, kv_cache_config)
    check_steps(vllm_config, kv_cache_config)
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        raise ModelRefused("vLLM does not tell a tier which adapter a request uses: use TierCacheConnector for LoRA")
    if parallel.nnodes_within_dp > 1:
        raise ModelRefused("the offload memory of one node does not hold the blocks of all: use TierCacheConnector")
    if [group.group_id for group in offloading.groups] != list(range(len(groups))):
        raise ModelRefused("vLLM offloads only some of the model's KV cache groups: the tier is not used")
    blocks_per_chunk = offloading.cache.blocks_per_chunk
    extra = {
        "workers": f"tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}",
        "rows": f"{blocks_per_chunk} x {offloading.worker_kv_bytes_per_block}, "
        f"replicated {offloading.replicated_layout}, canonical {offloading.canonical_layout}",
        "pages": _pages(vllm_config, kv_cache_config),
        "device": _device(),
    }

    def window_chunks(spec: Any) -> int:
        """As many chunks as vLLM looks for: of a windowed group it stores no more than that either."""
        return int(window_in_chunks(spec, spec.block_size * blocks_per_chunk))

    namespaces = []
    for part in parts_of(kv_cache_config, window_chunks):
        group = groups[part.group]
        spec = next(iter(layer_specs(group).values()))
        name = f"{part.group} of {type(spec).__name__}"
        if part.every > 1:
            name += f" chunk {part.offset} of {part.every}"
        namespace = NamespaceSpec(
            engine=f"vllm/{VERSION} offload",
            layout=f"{offloading.kv_cache_layout} rows",
            dtype=offloading.model.dtype,
            block_size=unit * blocks_per_chunk,
            block_bytes=row_bytes,
            layers=len(group.layer_names),
            kv_heads=getattr(spec, "num_kv_heads", 0),
            head_dim=getattr(spec, "head_size", 0),
            group=name,
            quantization=str(getattr(spec, "kv_quant_mode", "none")),
            window_blocks=part.window,
            extra=extra,
        )
        namespaces.append((part, namespace))
    return namespaces


def _pages(vllm_config: Any, kv_cache_config: Any) -> str:
    """A hash of what else determines the place of a value in a row: layers, their order and specs, attention
    backends."""
    groups = [(group.layer_names, str(layer_specs(group))) for group in kv_cache_config.kv_cache_groups]
    placed = [tensor.layers for tensor in kv_cache_config.kv_cache_tensors]
    described = repr((groups, placed, vllm_config.attention_config))
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _device() -> str:
    """The kind of device: vLLM chooses an attention backend by it, and that how it packs a block."""
    if current_platform.is_cpu():
        amx = torch.cpu.get_capabilities().get("amx_tile", False)
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx {amx}"
    return f"{current_platform.device_type} {current_platform.get_device_name()}"
