"""A model's config.json as sizes: bytes of KV per token, bytes of weights, work per token.

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

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
KV_DTYPES = ("auto", "bf16", "fp8", "int8", "int4")
# What `tiercache.kernels.kv_formats` documents; a test compares the two, since that one needs torch.
_GROUP = 32
_RECORD_ALIGNMENT_BYTES = 16
_MXFP4_BYTES = 4.25 / 8  # 4 bits, and one byte of scale for 32 of them


@dataclass(frozen=True)
class Layer:
    """What a layer keeps of a token and computes for it. `window`: tokens that it looks back; 0: all."""

    window: int
    parameters: int
    active_parameters: int
    expert_parameters: int
    attention_flops_per_token_pair: int


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
        """Multiplications and additions to compute a prompt of so many tokens from scratch."""
        flops = 2.0 * self.active_parameters * tokens
        for layer in self.layers:
            window = min(layer.window or tokens, tokens)
            pairs = window * (window + 1) / 2 + (tokens - window) * window
            flops += layer.attention_flops_per_token_pair * pairs
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
            raise ConfigError(f"{path} is no config.json: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is no config.json: it holds a {type(config).__name__}")
        return read_config(path.parent.resolve().name, config)
    known = find(name, MODELS)
    if known is None:
        raise unknown("model", name, MODELS, "or give the path of a model's config.json")
    return read_config(known, MODELS[known])


def read_config(name: str, config: dict[str, Any]) -> Model:
    """The shape that a config.json, or its `text_config` if present, describes. Raises ConfigError."""
    fields = _Fields(name, {**config, **(config.get("text_config") or {})})
    heads, count = fields.number("num_attention_heads"), fields.number("num_hidden_layers")
    hidden = fields.number("hidden_size")
    kv_heads = fields.number("num_key_value_heads", heads)
    head_dim = fields.number("head_dim", hidden // heads)
    if not kv_heads or not head_dim:
        raise fields.wrong("it has no KV heads, or heads of no size: correct its configuration")
    latent = fields.number("kv_lora_rank", 0)
    if latent:
        latent += fields.number("qk_rope_head_dim")
    windows = _windows(fields, count)
    embedding = fields.number("vocab_size") * hidden
    tied = bool(fields.get("tie_word_embeddings", False))
    quantization = (fields.get("quantization_config") or {}).get("quant_method") or ""
    return Model(
        name=name,
        layers=tuple(
            _layer(fields, number, windows[number], (hidden, heads, kv_heads, head_dim)) for number in range(count)
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        dtype_bytes=_dtype_bytes(fields),
        embedding_parameters=embedding if tied else 2 * embedding,
        max_tokens=fields.number("max_position_embeddings", 0),
        quantization=str(quantization),
    )


class _Fields:
    """A configuration whose errors name the field that is missing or not a number."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self._name = name
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.wrong(f"its configuration has no {key}: give the config.json of a decoder for transformers")
        least = 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"{key} is {value!r}, no whole number from {least} on: correct its configuration")
        return value

    def wrong(self, text: str) -> ConfigError:
        return ConfigError(f"{self._name}: {text}")


def _dtype_bytes(fields: _Fields) -> int:
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise fields.wrong(f"torch_dtype is {dtype}: known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _windows(fields: _Fields, count: int) -> list[int]:
    """How far back each layer looks, 0 for all: from `layer_types`, from a pattern, or the same for all layers."""
    window = fields.number("sliding_window", 0)
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise fields.wrong(f"layer_types does not name {count} layers: correct its configuration")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if not window or fields.get("use_sliding_window") is False:
        return [0] * count
    if pattern := fields.number("sliding_window_pattern", 0):  # the last of every so many layers looks at everything
        return [0 if (number + 1) % pattern == 0 else window for number in range(count)]
    first = fields.number("max_window_layers", 0) if fields.get("use_sliding_window") else 0
    return [window if number >= first else 0 for number in range(count)]


def _layer(fields: _Fields, number: int, window: int, shape: tuple[int, int, int, int]) -> Layer:
    hidden, heads, kv_heads, head_dim = shape
    if rank := fields.number("kv_lora_rank", 0):
        attention, pair_flops = _latent_attention(fields, hidden, heads, rank)
    else:
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        pair_flops = 4 * heads * head_dim
    total, active, experts = _feed_forward(fields, number, hidden)
    return Layer(window, attention + total, attention + active, experts, pair_flops)


def _latent_attention(fields: _Fields, hidden: int, heads: int, rank: int) -> tuple[int, int]:
    """Weights of multi-head latent attention, and work for a pair of tokens in a prefill."""
    nope, rope, value = (fields.number(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank = fields.number("q_lora_rank", 0)
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    latent = hidden * (rank + rope) + rank * heads * (nope + value)
    return query + latent + heads * value * hidden, 2 * heads * (nope + rope + value)


def _feed_forward(fields: _Fields, number: int, hidden: int) -> tuple[int, int, int]:
    """Weights of a layer after its attention: all, those used for a token, those of experts."""
    inner = fields.number("intermediate_size")
    experts = next(
        (fields.number(key) for key in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(key)), 0
    )
    if not experts or number < fields.number("first_k_dense_replace", 0) or number in fields.get("mlp_only_layers", ()):
        return 3 * hidden * inner, 3 * hidden * inner, 0
    one = 3 * hidden * fields.number("moe_intermediate_size", inner)
    chosen = fields.number("num_experts_per_tok")
    shared = one * fields.number("n_shared_experts", 0) + hidden * experts
    return shared + one * experts, shared + one * chosen, one * experts
