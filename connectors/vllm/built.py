"""Describes what a rank has built around its weights that affects the K and V it computes.

vLLM takes some of that from neither weights nor config: `max_model_len` decides which factors of LongRoPE apply and
whether attention is tempered, and the way of loading decides the scales of quantised KV. This module describes not
those settings but their result in the rank's own modules, whatever it came from:

    code of the model       its classes, their switches and factors, and tensors that are in no checkpoint
    rotary embeddings       the same and all their numbers, which make tables of sines and cosines
    attention layers        the scales and the type of their KV

Integers in the code of a model are sizes that follow from its config, ranks, or limits of the engine. They are left
out: engines that differ in limits share blocks, and ranks with equal blocks have one name for them. Linear layers are
left out too: they have weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

ROTARY = "vllm.model_executor.layers.rotary_embedding"
OTHER_CODE = ("torch.", "vllm.model_executor.layers.", "vllm.model_executor.custom_op.", "vllm.lora.")
"""Modules of these packages are not the model's own code."""
RUNS = {
    "compiled",
    "do_not_compile",
    "enable_eplb",
    "evaluate_guards",
    "first_compile",
    "layer_name",
    "layerwise_nvtx_tracing_enabled",
    "prefix",
    "training",
    "was_aot_compile_fn_loaded_from_disk",
}
"""Attributes that say how a model is run, and nothing of what it computes."""
SWITCHES = (bool, float, str)
NUMBERS = (*SWITCHES, int, torch.dtype)
SCALES = ("_k_scale_float", "_v_scale_float", "kv_cache_dtype", "calculate_kv_scales")


def describe_built(models: Iterable[torch.nn.Module]) -> str:
    """A hash of all that. Reads the tables of rotary embeddings, once for each."""
    described = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in seen:  # one rotary embedding often serves all layers
                continue
            seen.add(id(module))
            for line in _lines(module):
                described.update(line.encode() + b"\n")
    return described.hexdigest()


def _lines(module: torch.nn.Module) -> Iterator[str]:
    """Description of one module."""
    home = f"{type(module).__module__}."
    if home.startswith(ROTARY):
        yield from _state(module, NUMBERS)
    elif hasattr(module, "_k_scale_float"):
        yield repr([(name, getattr(module, name, None)) for name in SCALES])
    elif not home.startswith(OTHER_CODE):
        yield from _state(module, SWITCHES)


def _state(module: torch.nn.Module, kinds: tuple[type, ...]) -> Iterator[str]:
    """The class of a module, its attributes of these kinds, and the tensors that it has made itself."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if name not in RUNS and not name.startswith("_") and _is_plain(value, kinds)
    }
    yield f"{type(module).__module__}.{type(module).__qualname__} {sorted(plain.items())!r}"
    for name in sorted(module._non_persistent_buffers_set):
        tensor = module._buffers.get(name)
        if tensor is not None:
            yield f"{name} {tensor.dtype} {list(tensor.shape)} {_digest(tensor)}"


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each, kinds) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each, kinds) for pair in value.items() for each in pair)
    return isinstance(value, kinds) and (int in kinds or type(value) is not int)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta" or not tensor.numel():
        return ""
    return xxhash.xxh3_128(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
