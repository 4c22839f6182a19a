"""The KV cache groups of a model: which are served, and how their blocks make blocks of the cache.

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

import math
from typing import Any, NamedTuple

from tiercache.errors import ModelRefused

from .compat import kv_cache_interface

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
