"""A model's config.json as sizes: bytes of KV per token and of a state, bytes of weights, work per token.

Only arithmetic on the configuration: nothing is loaded, and torch is not needed. Counted as in transformers' model
code; biases and norms are left out (less than 0.1%).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError
from tiercache.ground.units import round_up
from tiercache.plan.known import MODELS, find, unknown
from tiercache.plan.layers import Fields, Layer, Shape, read_layers

KV_DTYPES = ("auto", "bf16", "fp8", "int8", "int4")
# What `tiercache.kernels.kv_formats` documents; a test compares the two, since that one needs torch.
_GROUP = 32
_RECORD_ALIGNMENT_BYTES = 16
_MXFP4_BYTES = 4.25 / 8  # 4 bits, and one byte of scale for 32 of them


@dataclass(frozen=True)
class Model:
    """Shape of a decoder. Attention has `kv_heads` x `head_dim`, or a latent of `latent` elements (MLA)."""

    name: str
    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    head_dim: int
    latent: int
    dtype_bytes: int
    embedding_parameters: int
    max_tokens: int
    quantization: str

    @cached_property
    def parameters(self) -> int:
        """All weights, embeddings included."""
        return self.embedding_parameters + sum(layer.parameters for layer in self.layers)

    @cached_property
    def kv_layers(self) -> tuple[Layer, ...]:
        """Those that keep KV of each token; the others keep a state."""
        return tuple(layer for layer in self.layers if layer.state is None)

    def state_gpu_bytes(self, gpus: int) -> int:
        """Bytes of a sequence's state on each of that many GPUs, all layers; 0 for a model without recurrent layers."""
        return sum(layer.state.gpu_bytes(gpus) for layer in self.layers if layer.state is not None)

    @cached_property
    def active_parameters(self) -> int:
        """Weights used for a prompt's token: no embedding, no output head, only the chosen experts."""
        return sum(layer.active_parameters for layer in self.layers)

    def weights_bytes(self) -> int:
        """Bytes of the weights in memory. Raises ConfigError for an unknown quantisation."""
        if self.quantization == "":
            return self.parameters * self.dtype_bytes
        if self.quantization == "fp8":
            return self.parameters - self.embedding_parameters + self.embedding_parameters * self.dtype_bytes
        if self.quantization == "mxfp4":
            experts = sum(layer.expert_parameters for layer in self.layers)
            return int(experts * _MXFP4_BYTES) + (self.parameters - experts) * self.dtype_bytes
        text = f"weights quantised as {self.quantization!r} are not known here: give their size, --weights 40GiB"
        raise ConfigError(f"{self.name}: {text}")

    def prefill_flops(self, tokens: int) -> float:
        """Multiplications and additions to compute a prompt of that many tokens from scratch."""
        flops = 2.0 * self.active_parameters * tokens
        for layer in self.layers:
            window = min(layer.window or tokens, tokens)
            pairs = window * (window + 1) / 2 + (tokens - window) * window
            flops += layer.attention_flops_per_token_pair * pairs + layer.state_flops_per_token * tokens
        return flops

    def heads_per_gpu(self, tensor_parallel: int) -> int:
        """KV heads on each GPU; with more GPUs than heads, each head is on several GPUs."""
        return 1 if self.latent else max(1, -(-self.kv_heads // tensor_parallel))

    def layer_block_bytes(self, kv_dtype: str, block_size: int, heads: int) -> int:
        """Bytes of a block of one layer on one GPU. Raises ConfigError for a latent in a format for K and V."""
        if self.latent:
            if kv_dtype not in ("auto", "bf16"):
                text = "its latent (MLA) is kept as it is: use --kv-cache-dtype auto"
                raise ConfigError(f"{self.name}: {kv_dtype} is a format of K and V, and {text}")
            return block_size * self.latent * (2 if kv_dtype == "bf16" else self.dtype_bytes)
        if kv_dtype in ("auto", "bf16"):
            return 2 * heads * self.head_dim * block_size * (2 if kv_dtype == "bf16" else self.dtype_bytes)
        return record_bytes(kv_dtype, block_size, heads, self.head_dim)


def record_bytes(kv_dtype: str, slots: int, heads: int, channels: int) -> int:
    """Bytes of a quantised block of one layer: codes, then scales, padded to 16 bytes."""
    cells = heads * slots * channels
    if kv_dtype == "fp8":
        size = 2 * cells + 2 * (2 * heads)
    elif kv_dtype == "int8":
        size = 2 * cells + 2 * heads * channels + 2 * heads * slots
    else:
        if channels % 2:
            raise ConfigError(f"int4 needs an even head_dim, not {channels}: use int8")
        steps = heads * (slots // gcd(_GROUP, slots)) * channels + heads * slots * (channels // gcd(_GROUP, channels))
        size = cells + 2 * steps + 2 * (2 * heads)
    return round_up(size, _RECORD_ALIGNMENT_BYTES)


# --- reading a configuration ---------------------------------------------------------------------


def load_model(name: str) -> Model:
    """A model by the path of its folder or config.json, or by a known name. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a config.json: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is not a config.json: it holds a {type(config).__name__}")
        return read_config(path.parent.resolve().name, config)
    known = find(name, MODELS)
    if known is None:
        raise unknown("model", name, MODELS, "or give the path of a model's config.json")
    return read_config(known, MODELS[known])


def read_config(name: str, config: dict[str, Any]) -> Model:
    """The shape that a config.json, or its `text_config` if present, describes. Raises ConfigError."""
    fields = Fields(name, {**config, **(config.get("text_config") or {})})
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    kv_heads = fields.number("num_key_value_heads", heads)
    head_dim = fields.number("head_dim", hidden // heads)
    if not kv_heads or not head_dim:
        raise fields.wrong("it has no KV heads, or heads of no size: correct its configuration")
    latent = fields.number("kv_lora_rank", 0)
    if latent:
        latent += fields.number("qk_rope_head_dim")
    layers = read_layers(fields, Shape(hidden, heads, kv_heads, head_dim))
    if all(layer.state for layer in layers):
        raise fields.wrong("none of its layers has attention: there is no KV of tokens to plan for")
    embedding = fields.number("vocab_size") * hidden
    family_ties = str(fields.get("model_type", "")).startswith("lfm2")
    tied = bool(fields.get("tie_embedding", fields.get("tie_word_embeddings", family_ties)))
    quantization = (fields.get("quantization_config") or {}).get("quant_method") or ""
    return Model(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        dtype_bytes=fields.dtype_bytes(),
        embedding_parameters=embedding if tied else 2 * embedding,
        max_tokens=fields.number("max_position_embeddings", 0),
        quantization=str(quantization),
    )
