"""A transformers model: whether it can be served, and the form of its blocks."""

from __future__ import annotations

import itertools
import logging
from typing import Any, NamedTuple

import torch

from tiercache.errors import ConfigError, ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec
from transformers import DynamicCache

ENGINE_NAME = "transformers/1"
BLOCK_LAYOUT = "layer,2,kv_head,slot,head_dim"
SERVED = (5, 6)
"""Versions of transformers: from the first, below the second."""
PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
PROBE_TOKENS = 24
PROBE_CUT = 16
PROBE_PADDING = 11

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
    return limit


def try_model(model: Any) -> tuple[list[LayerShape], torch.dtype]:
    """Run a few tokens whole and in two parts. Returns the shape of each layer's K and V, and their type.

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


def padding_is_neutral(model: Any) -> bool:
    """Whether `generate` computes the same K and V of tokens with padding before them as without."""
    tokens, padding = _tokens(model), torch.zeros(1, PROBE_PADDING, dtype=torch.long, device=model.device)
    settings = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "pad_token_id": 0}
    alone, padded = DynamicCache(), DynamicCache()
    mask = torch.ones_like(tokens)
    try:
        model.generate(input_ids=tokens, attention_mask=mask, past_key_values=alone, **settings)
        both, mask = torch.cat([padding, tokens], 1), torch.cat([padding, mask], 1)
        model.generate(input_ids=both, attention_mask=mask, past_key_values=padded, **settings)
        for layer, other in zip(alone.layers, padded.layers, strict=True):
            keys, others = layer.keys.float(), other.keys[:, :, PROBE_PADDING:].float()
            if not (others - keys).norm() <= _bound(layer.keys.dtype) * keys.norm():
                return False
    except Exception:
        # A model that cannot do it is served without padding.
        logger.debug("%s was tried with padding", type(model).__name__, exc_info=True)
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
    return shapes, dtype


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
