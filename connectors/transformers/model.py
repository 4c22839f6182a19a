"""A transformers model: whether it can be served, and the form of its blocks."""

from __future__ import annotations

import itertools
import logging
import sys
from typing import Any, NamedTuple

import torch

from tiercache.errors import ConfigError, ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec
from transformers import DynamicCache, GenerationConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from . import calls

ENGINE_NAME = "transformers/1"
BLOCK_LAYOUT = "layer,2,kv_head,slot,head_dim"
SERVED = (5, 6)
"""Versions of transformers: from the first, below the second."""
PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
PROBE_TOKENS = 24
PROBE_CUT = 16
PROBE_PADDING = 11
GENERATE_CUTS = (PROBE_CUT, PROBE_TOKENS - 1)
"""What is restored when `generate` is tried: it computes several tokens behind it, and a single one."""
SERVED_SETTINGS: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "max_new_tokens": 1,
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict_in_generate", "use_mtp"), False),
    **dict.fromkeys(("cache_implementation", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha")),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "guidance_scale", "prefill_chunk_size")),
    "stop_strings": None,
    "token_healing": False,
    "pad_token_id": 0,
}
"""Settings of a call that is served, whatever the model's defaults are; this version of transformers may lack some."""
AHEAD = (True, "all")
"""Values of `use_bidirectional_attention` with which texts are not sequences."""
WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_masks_for_generate")
"""What modules import whose masks have a window."""
SAME = 0.02
"""The relative difference allowed between the same numbers computed among others, of any type."""

logger = logging.getLogger("tiercache.connectors.transformers")


class LayerShape(NamedTuple):
    """What one layer keeps per token, and where."""

    kv_heads: int
    k_dim: int
    v_dim: int
    device: torch.device


def check_version(version: str) -> None:
    first, below = SERVED
    if not first <= int(version.split(".")[0]) < below:
        raise ModelRefused(f"transformers {version} is not served: install transformers>={first},<{below}")


def constant_rope_tokens(config: Any) -> int:
    """Up to how many tokens the K of a token is independent of the length of its sequence."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    limit = 1 << 40
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if entry.get("rope_type") == "dynamic":
            raise ModelRefused("its rope_type is dynamic, so that K depends on what was computed before: use another")
        if entry.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            limit = min(limit, int(entry.get(name) or getattr(text, name, None) or text.max_position_embeddings))
    # Doge's attention chooses keys once there are more: equal ones by the length of the sequence.
    return min(limit, int(getattr(text, "keep_window_size", None) or limit))


def try_model(model: Any) -> tuple[list[LayerShape], torch.dtype]:
    """Run a few tokens whole, in parts, and with another end. Returns each layer's shape of K and V, and their type.

    Raises ModelRefused.
    """
    try:
        return _try(model)
    except ModelRefused:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelRefused(f"{type(model).__name__} cannot be tried as a decoder: {what}") from error


def _tokens(model: Any) -> torch.Tensor:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    return (torch.arange(PROBE_TOKENS, device=model.device) * 7 % vocabulary)[None]


def _bound(dtype: torch.dtype) -> float:
    """The relative difference allowed between two ways to compute the same."""
    return 1e-3 if dtype == torch.float32 else 0.2


def try_generate(model: Any) -> bool:
    """Run `generate` from a restored prefix. Returns whether padding before tokens changes nothing of their K and V.

    Raises ModelRefused: `generate` computes something else from a restored prefix or than `forward`, or cannot go on
    from a restored prefix.
    """
    tokens, padding = _tokens(model), torch.zeros(1, PROBE_PADDING, dtype=torch.long, device=model.device)
    mask = torch.ones_like(tokens)
    try:
        alone, plain = _generated(model, tokens, mask, DynamicCache()), DynamicCache()
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=plain, use_cache=True)
        restored = [_generated(model, tokens, mask, _first(alone, cut)) for cut in GENERATE_CUTS]
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelRefused(f"{type(model).__name__} cannot generate from a restored prefix: {what}") from error
    if not all(_alike(alone, one) for one in restored):
        raise ModelRefused(f"generate of {model.config.model_type} computes something else from a restored prefix")
    if not _alike(alone, plain):  # one name stands for what either of them computes
        raise ModelRefused(f"generate of {model.config.model_type} gives tokens other positions than forward does")
    if getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False):
        return False  # Llama 4 scales by positions that count padding, from `floor_scale` tokens on
    tokens, mask = torch.cat([padding, tokens], 1), torch.cat([padding, mask], 1)
    begun = [DynamicCache(), *(_first(alone, cut, PROBE_PADDING) for cut in GENERATE_CUTS)]
    try:
        return all(_alike(alone, _generated(model, tokens, mask, one), skipped=PROBE_PADDING) for one in begun)
    except Exception:
        # A model that cannot do it is served without padding.
        logger.debug("%s was tried with padding", type(model).__name__, exc_info=True)
        return False


def _generated(model: Any, tokens: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> DynamicCache:
    """The cache after a call of `generate` that went on from `cache`."""
    known = GenerationConfig()
    settings = {name: value for name, value in SERVED_SETTINGS.items() if hasattr(known, name)}
    options = {"input_ids": tokens, "attention_mask": mask, **settings}
    calls.generate(model, (), options, lambda ids, mask: cache, lambda *_: None)
    if cache.get_seq_length() != tokens.shape[1]:
        raise ModelRefused("its generate did not fill the cache that it was given")
    return cache


def _first(cache: DynamicCache, tokens: int, padding: int = 0) -> DynamicCache:
    """The first tokens of a cache, behind zeros for padding."""
    part = DynamicCache()
    for layer_id, layer in enumerate(cache.layers):
        first = (torch.nn.functional.pad(one[:, :, :tokens], (0, 0, padding, 0)) for one in (layer.keys, layer.values))
        part.update(*first, layer_id)
    return part


def _alike(cache: DynamicCache, other: DynamicCache, skipped: int = 0, bound: float = 0.0) -> bool:
    """True if K and V of all tokens of `cache` are nearly those of `other` behind its first `skipped` ones."""
    for layer, others in zip(cache.layers, other.layers, strict=True):
        for mine, theirs in ((layer.keys, others.keys), (layer.values, others.values)):
            expected, found = mine.float(), theirs[:, :, skipped : skipped + mine.shape[2]].float()
            if not (found - expected).norm() <= (bound or _bound(mine.dtype)) * expected.norm():
                return False
    return True


@torch.no_grad()
def _try(model: Any) -> tuple[list[LayerShape], torch.dtype]:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelRefused(f"{model.config.model_type} is an encoder-decoder model: give a decoder")
    if model.training:
        raise ModelRefused("the model is in training mode: call model.eval() first")
    own = DynamicCache(config=model.config)
    strange = sorted({type(layer).__name__ for layer in own.layers} - PLAIN_LAYERS)
    if strange or not model._supports_default_dynamic_cache():
        kinds = ", ".join(strange) or "a cache of its own"
        raise ModelRefused(f"{model.config.model_type} has {kinds}: only K and V per layer are served")
    if any(type(layer).__name__ != "DynamicLayer" for layer in own.layers):
        _check_window(model)
    _check_state(model)
    tokens = _tokens(model)
    whole, resumed = DynamicCache(), DynamicCache()
    expected = model(input_ids=tokens, past_key_values=whole, use_cache=True).logits[:, PROBE_CUT:].float()
    shapes = []
    for layer_id, layer in enumerate(whole.layers):
        keys, values = layer.keys, layer.values
        if keys is None or keys.ndim != 4 or keys.shape[-2] != PROBE_TOKENS or keys.dtype != values.dtype:
            raise ModelRefused(f"layer {layer_id} of {model.config.model_type} keeps no K and V of every token")
        shapes.append(LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], keys.device))
        resumed.update(keys[:, :, :PROBE_CUT], values[:, :, :PROBE_CUT], layer_id)
    if not shapes or len({layer.keys.dtype for layer in whole.layers}) > 1:
        raise ModelRefused(f"{model.config.model_type} keeps K and V of several types, or none")
    found = model(input_ids=tokens[:, PROBE_CUT:], past_key_values=resumed, use_cache=True).logits.float()
    dtype: torch.dtype = whole.layers[0].keys.dtype
    apart = float((found - expected).norm() / expected.norm())
    if not apart < _bound(dtype):
        raise ModelRefused(f"{model.config.model_type} computes something else from a restored prefix")
    _check_causal(model, tokens, whole)
    return shapes, dtype


def _check_window(model: Any) -> None:
    """Raise ModelRefused if nothing but the model's own cache makes its sliding window: ours keeps all tokens."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    own = [name for name in names if not name.startswith(("torch.", "transformers.")) or ".models." in name]
    if not any(hasattr(sys.modules.get(module), name) for module in own for name in WINDOW_MASKS):
        raise ModelRefused(f"the masks of {model.config.model_type} do not have its sliding window")


def _check_state(model: Any) -> None:
    """Raise ModelRefused for a model that keeps something between calls besides its cache, or only a part of itself."""
    for name, module in model.named_modules():
        if hasattr(module, "rope_deltas"):
            raise ModelRefused(f"{name or 'the model'} keeps positions of one call for the next (rope_deltas)")
    divided = (getattr(model, "_tp_size", None) or 1) > 1 or any(_is_sharded(one) for one in model.parameters())
    if divided or is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled():
        # Each rank of tensor parallelism has K and V of some heads: one name would stand for all of them.
        raise ModelRefused("its weights are divided among processes (tensor parallelism, FSDP, ZeRO-3): load it whole")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """True for a DTensor, without importing its module."""
    return hasattr(parameter, "device_mesh")


def _check_causal(model: Any, tokens: torch.Tensor, whole: DynamicCache) -> None:
    """Raise ModelRefused if the K and V of a prefix depend on what follows it.

    With another continuation of the same length the same kernels run, so that the same numbers come out, but for
    experts: these compute their tokens in another order.
    """
    text = model.config.get_text_config(decoder=True)
    ahead = getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in AHEAD
    alone, otherwise = DynamicCache(), DynamicCache()
    model(input_ids=tokens[:, :PROBE_CUT], past_key_values=alone, use_cache=True)
    other = torch.cat([tokens[:, :PROBE_CUT], tokens[:, PROBE_CUT:].flip(1)], 1)
    model(input_ids=other, past_key_values=otherwise, use_cache=True)
    prefix = _first(whole, PROBE_CUT)
    if ahead or not (_alike(alone, whole) and _alike(prefix, otherwise, bound=SAME)):
        raise ModelRefused(f"the tokens of {model.config.model_type} attend to later ones: only decoders are served")


def make_namespace(shapes: list[LayerShape], dtype: torch.dtype, block_size: int) -> NamespaceSpec:
    described = [f"{heads}x{k_dim}+{v_dim}" for heads, k_dim, v_dim, _ in shapes]
    runs = [f"{len(list(run))}*{name}" for name, run in itertools.groupby(described)]
    tokens_bytes = sum(heads * (k_dim + v_dim) for heads, k_dim, v_dim, _ in shapes) * dtype.itemsize
    spec = NamespaceSpec(
        engine=ENGINE_NAME,
        layout=BLOCK_LAYOUT,
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        block_bytes=tokens_bytes * block_size,
        layers=len(shapes),
        kv_heads=shapes[0].kv_heads,
        head_dim=shapes[0].k_dim,
        extra={"shapes": " ".join(runs)},
    )
    if problem := spec.problem():
        raise ConfigError(f"{problem}; change block_size")
    return spec
