"""vLLM's KV cache tensors as pools of blocks, and the form of those blocks.

The bytes of a block are taken as they are, whatever an attention backend puts there: all pages of the layers of one KV
cache group, one after another. Everything that affects their meaning is in the namespace.
"""

from __future__ import annotations

import itertools
import platform
from typing import Any

import torch

from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError
from tiercache.protocol.namespaces import NamespaceSpec

from .compat import VERSION, kv_cache_interface
from .groups import GroupPart, check_groups, layer_specs, parts_of, replicated


def make_pools(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], built: str
) -> list[tuple[NamespaceSpec, Pool]]:
    """Namespace and pool of each part of the KV cache groups of this rank. Raises LayoutError, ModelRefused.

    `built` is the result of `built.describe_built` for the rank.
    """
    unit, pools = check_groups(vllm_config, kv_cache_config), []
    groups = [_group_pool(vllm_config, kv_cache_config, group, kv_caches) for group in kv_cache_config.kv_cache_groups]
    for part in parts_of(kv_cache_config):
        group, (pool, pages) = kv_cache_config.kv_cache_groups[part.group], groups[part.group]
        pools.append((_namespace(vllm_config, part, group, unit, pool.block_bytes, pages, built), pool))
    return pools


def _group_pool(vllm_config: Any, kv_cache_config: Any, group: Any, kv_caches: dict[str, Any]) -> tuple[Pool, str]:
    """The pool of one KV cache group, and the form of its pages."""
    segments: list[Segment] = []
    forms: list[str] = []
    for name, spec in layer_specs(group).items():
        segment, form = _page(name, spec, kv_caches[name], kv_cache_config.num_blocks)
        segments.append(segment)
        forms.append(f"{form} {_backend(vllm_config, name)}")
    arrays = [kv_caches[name] for name in group.layer_names]
    pages = "; ".join(f"{len(list(run))} x {form}" for form, run in itertools.groupby(forms))
    return Pool(_joined(segments), kv_cache_config.num_blocks, str(arrays[0].device), True, arrays), pages


def _page(name: str, spec: Any, cache: torch.Tensor, num_blocks: int) -> tuple[Segment, str]:
    """Where the pages of one layer are, and how one is laid out."""
    blocks = kv_cache_interface.group_kernel_blocks(cache, num_blocks)
    item = blocks.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    if extent != blocks[0].numel() or extent * item > spec.page_size_bytes or blocks.stride(0) < extent:
        raise LayoutError(f"the blocks of {name} are not one piece each ({blocks.shape}, strides {blocks.stride()})")
    segment = Segment(blocks.data_ptr(), blocks.stride(0) * item, extent * item)
    form = f"{blocks.dtype} {list(blocks.shape[1:])} {list(blocks.stride()[1:])}"
    if hasattr(spec, "shapes"):  # states of several kinds, whose types vLLM's memory does not show
        form += f" of {[list(shape) for shape in spec.shapes]} {list(spec.dtypes)}"
    return segment, form


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
    vllm_config: Any, part: GroupPart, group: Any, unit: int, block_bytes: int, pages: str, built: str
) -> NamespaceSpec:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    spec = next(iter(layer_specs(group).values()))
    tp_rank, tp_size = parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
    if replicated(vllm_config, group):
        tp_rank, tp_size = 0, 1  # every rank has all of it: it is stored once
    name = [f"{part.group} of {type(spec).__name__}"]
    if part.window and not part.state:
        name.append(str(spec.sliding_window))
    if part.every > 1:
        name.append(f"block {part.offset} of {part.every}")
    device = platform.machine() if vllm_config.device_config.device_type == "cpu" else ""
    return NamespaceSpec(
        engine=f"vllm/{VERSION}",
        layout=f"{cache.kv_cache_layout} pages",
        dtype=str(cache.cache_dtype),
        block_size=unit,
        block_bytes=block_bytes,
        layers=len(group.layer_names),
        kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
        group=" ".join(name),
        quantization=str(getattr(spec, "kv_quant_mode", "none")),
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        window_blocks=part.window,
        extra={
            "pages": pages,
            "device": f"{vllm_config.device_config.device_type} {device}".strip(),
            "built": built,
        },
    )
