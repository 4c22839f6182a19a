"""vLLM's KV cache tensors as pools of blocks, and the form of those blocks.

The bytes of a block are taken as they are, whatever an attention backend puts there: all pages of the layers of one KV
cache group, one after another. Everything that affects their meaning is in the namespace.
"""

from __future__ import annotations

import itertools
import platform
from typing import Any

import torch

from tiercache.connectors.vllm.compat import VERSION, kv_cache_interface
from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError, ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec

FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
WINDOWED = {"SlidingWindowSpec"}


def layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a KV cache group."""
    spec = group.kv_cache_spec
    many = isinstance(spec, kv_cache_interface.UniformTypeKVCacheSpecs)
    return {name: spec.kv_cache_specs[name] if many else spec for name in group.layer_names}


def check_groups(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens in a block. Raises ModelRefused for KV cache groups that cannot be served."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ModelRefused("context parallelism is not served: set its sizes to 1")
    groups = kv_cache_config.kv_cache_groups
    if not groups or len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        raise ModelRefused("the model has KV cache groups whose blocks have no hashes: it is served without the cache")
    for group in groups:
        kinds = {type(spec).__name__ for spec in layer_specs(group).values()}
        if not kinds <= FULL and not kinds <= WINDOWED:
            raise ModelRefused(f"KV cache groups of {', '.join(sorted(kinds))} are not served: only attention is")
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) > 1:
        raise ModelRefused(f"KV cache groups with blocks of {sorted(sizes)} tokens are not served: they must be equal")
    return int(sizes.pop())


def make_pools(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], built: str
) -> list[tuple[NamespaceSpec, Pool]]:
    """Namespace and pool of each KV cache group of this rank. Raises LayoutError, ModelRefused.

    `built` is the result of `built.describe_built` for the rank.
    """
    block_size = check_groups(vllm_config, kv_cache_config)
    pools = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        segments: list[Segment] = []
        forms: list[str] = []
        for name, spec in layer_specs(group).items():
            segment, form = _page(name, spec, kv_caches[name], kv_cache_config.num_blocks)
            segments.append(segment)
            forms.append(f"{form} {_backend(vllm_config, name)}")
        arrays = [kv_caches[name] for name in group.layer_names]
        pool = Pool(_joined(segments), kv_cache_config.num_blocks, str(arrays[0].device), True, arrays)
        pools.append((_namespace(vllm_config, group_id, group, block_size, pool.block_bytes, forms, built), pool))
    return pools


def _page(name: str, spec: Any, cache: torch.Tensor, num_blocks: int) -> tuple[Segment, str]:
    """Where the pages of one layer are, and how one is laid out."""
    blocks = kv_cache_interface.group_kernel_blocks(cache, num_blocks)
    item = blocks.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    if extent != blocks[0].numel() or extent * item > spec.page_size_bytes or blocks.stride(0) < extent:
        raise LayoutError(f"the blocks of {name} are not one piece each ({blocks.shape}, strides {blocks.stride()})")
    segment = Segment(blocks.data_ptr(), blocks.stride(0) * item, extent * item)
    return segment, f"{blocks.dtype} {list(blocks.shape[1:])} {list(blocks.stride()[1:])}"


def _backend(vllm_config: Any, layer_name: str) -> str:
    """The attention backend of a layer, and on a CPU the instructions for which it packs its blocks."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    return f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}"


def _joined(segments: list[Segment]) -> list[Segment]:
    """Segments whose bytes follow each other in every block, as one."""
    joined = segments[:1]
    for base, stride, length in segments[1:]:
        last = joined[-1]
        if last.base + last.bytes == base and last.stride == stride:
            joined[-1] = Segment(last.base, stride, last.bytes + length)
        else:
            joined.append(Segment(base, stride, length))
    return joined


def _namespace(
    vllm_config: Any,
    group_id: int,
    group: Any,
    block_size: int,
    block_bytes: int,
    forms: list[str],
    built: str,
) -> NamespaceSpec:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    spec = next(iter(layer_specs(group).values()))
    tp_rank, tp_size = parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
    if replicated(vllm_config, group):
        tp_rank, tp_size = 0, 1  # every rank has all of it: it is stored once
    window = getattr(spec, "sliding_window", None) if type(spec).__name__ in WINDOWED else None
    retained = window - 1 + getattr(spec, "extra_retained_tokens", 0) if window else 0
    device = platform.machine() if vllm_config.device_config.device_type == "cpu" else ""
    runs = [f"{len(list(run))} x {form}" for form, run in itertools.groupby(forms)]
    return NamespaceSpec(
        engine=f"vllm/{VERSION}",
        layout=f"{cache.kv_cache_layout} pages",
        dtype=str(cache.cache_dtype),
        block_size=block_size,
        block_bytes=block_bytes,
        layers=len(group.layer_names),
        kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
        group=f"{group_id} of {type(spec).__name__} {window or ''}".strip(),
        quantization=str(getattr(spec, "kv_quant_mode", "none")),
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        window_blocks=-(-retained // block_size),
        extra={
            "pages": "; ".join(runs),
            "device": f"{vllm_config.device_config.device_type} {device}".strip(),
            "built": built,
        },
    )


def replicated(vllm_config: Any, group: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same blocks of a group."""
    kinds = {type(spec).__name__ for spec in layer_specs(group).values()}
    return bool(vllm_config.model_config.use_mla) and kinds <= {"MLAAttentionSpec"}
