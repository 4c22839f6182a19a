"""The KV cache groups of a model: which are served, how their blocks make blocks of the cache, and their pools.

Groups may differ in the tokens of a block (Gemma 4: 32 and 64). A block of the cache, and so a key, stands for as many
tokens as the least common multiple of all. It has a different number of blocks of each group, so each group has a
namespace of its own:

    tokens            0       32      64      96      128
    blocks of 64      [  first part   |  first part   ]
    blocks of 32      [ first | second| first | second]
    keys              [       0       |       1       ]

A group with a recurrent state has no block for most positions: vLLM keeps the state where a step ends, and at the end
of the last full block of a prompt. A match may only end there. So such a group is a window of one block.
"""

from __future__ import annotations

import itertools
import math
import platform
from typing import Any, NamedTuple

import torch

from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError, ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec

from .compat import VERSION, kv_cache_interface

FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
WINDOWED = {"SlidingWindowSpec"}
STATES = {"MambaSpec"}
MAX_PARTS = 16


class GroupPart(NamedTuple):
    """Every `every`-th block of a KV cache group, from block `offset` on.

    `block_size`: tokens in a block of the group. `window`: `NamespaceSpec.window_blocks`. `state`: these are states.
    """

    group: int
    block_size: int
    offset: int = 0
    every: int = 1
    window: int = 0
    state: bool = False

    @property
    def last(self) -> bool:
        """True if a block of it ends with a block of the cache."""
        return self.offset == self.every - 1


def layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a KV cache group."""
    spec = group.kv_cache_spec
    many = isinstance(spec, kv_cache_interface.UniformTypeKVCacheSpecs)
    return {name: spec.kv_cache_specs[name] if many else spec for name in group.layer_names}


def check_groups(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens in a block of the cache. Raises ModelRefused for KV cache groups that cannot be served."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ModelRefused("context parallelism is not served: set its sizes to 1")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        # All must decide alike, and what a lookup finds, and when, may differ.
        raise ModelRefused("external_launcher has a scheduler for each rank, which is not served: use mp or ray")
    groups = kv_cache_config.kv_cache_groups
    if not groups or len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        raise ModelRefused("the model has KV cache groups whose blocks have no hashes: it is served without the cache")
    for group in groups:
        specs = layer_specs(group).values()
        kinds = {type(spec).__name__ for spec in specs}
        if not kinds:
            raise ModelRefused("a pipeline stage without layers of one of the KV cache groups is not served")
        if not any(kinds <= served for served in (FULL, WINDOWED, STATES)):
            raise ModelRefused(f"KV cache groups of {', '.join(sorted(kinds))} are not served")
        if kinds <= STATES and {spec.mamba_cache_mode for spec in specs} != {"align"}:
            raise ModelRefused("recurrent states are only served with mamba_cache_mode align, vLLM's default")
        if kinds <= STATES and any(spec.num_speculative_blocks for spec in specs):
            raise ModelRefused("recurrent states are not served together with speculative decoding")
    unit = _unit(kv_cache_config)
    if unit // min(group.kv_cache_spec.block_size for group in groups) > MAX_PARTS:
        raise ModelRefused(f"KV cache groups whose blocks only meet every {unit} tokens are not served")
    return unit


def check_steps(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ModelRefused if vLLM's steps need not end where blocks of states end. For its scheduler's process.

    A step that goes on from within such a block and past its end leaves the state of some token in between there,
    which vLLM's own prefix cache then takes for that of the end.
    """
    ends = vllm_config.cache_config.block_size
    for group in kv_cache_config.kv_cache_groups:
        for spec in layer_specs(group).values():
            if type(spec).__name__ in STATES and ends % spec.block_size:
                text = f"steps of vLLM end with blocks of {ends} tokens, and those of states have {spec.block_size}"
                raise ModelRefused(f"{text}: that is not served")


def _unit(kv_cache_config: Any) -> int:
    return math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


def parts_of(kv_cache_config: Any, retained: Any = None) -> list[GroupPart]:
    """The parts of all groups; those that no match needs are left out.

    `retained`: for a spec, how many blocks before the end of a match it needs; 0: all.
    """
    unit, parts = _unit(kv_cache_config), []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, size = next(iter(layer_specs(group).values())), group.kv_cache_spec.block_size
        state, full = type(spec).__name__ in STATES, type(spec).__name__ in FULL
        window = 0 if full else 1 if state else (retained or retained_blocks)(spec)
        every = unit // size
        for offset in range(every):
            part = GroupPart(number, size, offset, every, (window + offset) // every, state)
            if full or part.window:
                parts.append(part)
    return parts


def retained_blocks(spec: Any) -> int:
    """How many blocks vLLM keeps for a window at the end of a block."""
    retained = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    return -(-int(retained) // int(spec.block_size))


def leaves_last_token(kv_cache_config: Any) -> bool:
    """True if a match must end before the last token of a request.

    vLLM computes that token again even if all blocks are there. A state would then have it twice, and a window may
    begin one block earlier.
    """
    specs = [next(iter(layer_specs(group).values())) for group in kv_cache_config.kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs]
    return any(
        kind in STATES or (kind in WINDOWED and spec.sliding_window % spec.block_size == 1)
        for kind, spec in zip(kinds, specs, strict=True)
    )


def replicated(vllm_config: Any, group: Any) -> bool:
    """True if all tensor-parallel ranks hold the same blocks of a group."""
    specs = layer_specs(group).values()
    if all(type(spec).__name__ in STATES and spec.tp_replicated for spec in specs):
        return True
    kinds = {type(spec).__name__ for spec in specs}
    return bool(vllm_config.model_config.use_mla) and kinds <= {"MLAAttentionSpec"}


# --- vLLM's tensors as pools of blocks ---------------------------------------------------------------
#
# The bytes of a block are taken as they are, whatever an attention backend puts there: all pages of the layers of one
# KV cache group, one after another. Everything that affects their meaning is in the namespace.


def make_pools(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], built: str
) -> list[tuple[NamespaceSpec, Pool]]:
    """Namespace and pool of each part of the KV cache groups of this rank. Raises LayoutError, ModelRefused.

    `built` is the result of `weights.describe_built` for the rank.
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


def _device(kind: str) -> str:
    """The kind of device. vLLM computes quantised layers in other types on other generations of GPUs."""
    if kind == "cpu":
        return f"cpu {platform.machine()}"
    generation = torch.cuda.get_device_capability() if torch.cuda.is_available() else ""
    return f"{kind} {generation}".strip()


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
            "device": _device(vllm_config.device_config.device_type),
            "built": built,
        },
    )
