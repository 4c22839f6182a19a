"""The layers of a decoder: which have attention, a window or a state, and what each weighs and computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercache.errors import ConfigError
from tiercache.ground.units import round_up

# --- fields of a configuration -----------------------------------------------------------------------

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


class Fields:
    """The fields of a model's configuration."""

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

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if there is none."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.wrong(f"{key} is {values!r}, no list of whole numbers: correct its configuration")
        return values

    def dtype_bytes(self) -> int:
        """Bytes of a weight that is not quantised."""
        key = "dtype" if self.get("dtype") else "torch_dtype"
        return self.bytes_of(key, 2)

    def bytes_of(self, key: str, default: int) -> int:
        """Bytes of an element of the type that a field names."""
        dtype = self.get(key)
        if dtype is None:
            return default
        plain = str(dtype).removeprefix("torch.")
        if plain not in DTYPE_BYTES:
            raise self.wrong(f"{key} is {plain}: known are {', '.join(DTYPE_BYTES)}")
        return DTYPE_BYTES[plain]

    def wrong(self, text: str) -> ConfigError:
        return ConfigError(f"{self._name}: {text}")


_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = {"conv", "linear_attention", "mamba"}
# Fields of families whose recurrent layers this module cannot find, unless `layer_types` names them.
_OTHER_FAMILIES = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "hybrid_override_pattern", "linear_attn_config")


_FLOPS_PER_ELEMENT = 6
"""Of a state, for each token: it fades, takes the token in, and is read; a multiplication and an addition each."""


@dataclass(frozen=True)
class LayerState:
    """Bytes of a layer's state: those that GPUs share out, and those of groups, of which each GPU has at least one."""

    split_bytes: int
    group_bytes: int = 0
    groups: int = 0

    def gpu_bytes(self, gpus: int) -> int:
        """The part of each of that many GPUs."""
        return -(-self.split_bytes // gpus) + self.group_bytes * -(-self.groups // gpus)


@dataclass(frozen=True)
class Mixer:
    """What stands in a recurrent layer in the place of attention."""

    state: LayerState
    parameters: int
    state_flops_per_token: int


def recurrent_mixer(fields: Fields, kind: str, hidden: int) -> Mixer | None:
    """The mixer of layers of this kind; None if the configuration is of no known family."""
    if kind == "conv" and fields.get("conv_L_cache"):
        return _short_convolution(fields, hidden)
    if kind == "linear_attention" and fields.get("linear_num_value_heads"):
        return _gated_delta_net(fields, hidden)
    if kind in ("mamba", "linear_attention") and fields.get("mamba_d_state"):
        return _mamba2(fields, hidden) if fields.get("mamba_n_heads") else _mamba1(fields, hidden)
    return None


def _short_convolution(fields: Fields, hidden: int) -> Mixer:
    """LFM2: a convolution over the last tokens, between two gates."""
    length, channels = fields.number("conv_L_cache"), fields.number("conv_dim", hidden)
    state = LayerState((length - 1) * channels * fields.dtype_bytes())
    return Mixer(state, 4 * hidden * hidden + hidden * length, 0)


def _gated_delta_net(fields: Fields, hidden: int) -> Mixer:
    """Qwen3-Next and Qwen3.5: a matrix of keys x values for each head. vLLM keeps it in the type that
    `mamba_ssm_dtype` names (Qwen3.5), else in that of the model.
    """
    value_heads, kernel = fields.number("linear_num_value_heads"), fields.number("linear_conv_kernel_dim")
    key_size, value_size = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    keys, values = fields.number("linear_num_key_heads") * key_size, value_heads * value_size
    channels, matrices = 2 * keys + values, value_heads * key_size * value_size
    dtype_bytes = fields.dtype_bytes()
    convolution_bytes = channels * (kernel - 1) * dtype_bytes
    state = LayerState(convolution_bytes + matrices * fields.bytes_of("mamba_ssm_dtype", dtype_bytes))
    projections = hidden * (channels + values + 2 * value_heads) + values * hidden
    return Mixer(state, projections + channels * kernel, _FLOPS_PER_ELEMENT * matrices)


def _mamba2(fields: Fields, hidden: int) -> Mixer:
    """Granite 4, Bamba: a matrix for each head; the convolution has groups."""
    inner = fields.number("mamba_expand", 2) * hidden
    heads, kernel, size = (fields.number(key) for key in ("mamba_n_heads", "mamba_d_conv", "mamba_d_state"))
    groups, dtype_bytes = fields.number("mamba_n_groups", 1), fields.dtype_bytes()
    past_bytes = (kernel - 1) * dtype_bytes
    state = LayerState(inner * past_bytes + inner * size * dtype_bytes, 2 * size * past_bytes, groups)
    channels = inner + 2 * groups * size
    projections = hidden * (inner + channels + heads) + inner * hidden
    return Mixer(state, projections + channels * kernel, _FLOPS_PER_ELEMENT * inner * size)


def _mamba1(fields: Fields, hidden: int) -> Mixer:
    """Jamba: a short vector for each channel."""
    inner = fields.number("mamba_expand", 2) * hidden
    size, kernel = fields.number("mamba_d_state"), fields.number("mamba_d_conv")
    rank = -(-hidden // 16) if fields.get("mamba_dt_rank", "auto") == "auto" else fields.number("mamba_dt_rank")
    state = LayerState(inner * (kernel - 1 + size) * fields.dtype_bytes())
    projections = 2 * hidden * inner + inner * (rank + 2 * size) + rank * inner + inner * hidden
    return Mixer(state, projections + inner * (kernel + size), _FLOPS_PER_ELEMENT * inner * size)


@dataclass(frozen=True)
class Layer:
    """What a layer keeps and computes. With a `state` it keeps that of a sequence, and no KV of tokens. `window`:
    tokens that it looks back; 0: all.
    """

    window: int
    parameters: int
    active_parameters: int
    expert_parameters: int
    attention_flops_per_token_pair: int
    state: LayerState | None = None
    state_flops_per_token: int = 0


@dataclass(frozen=True)
class Shape:
    """Of a decoder and its attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def read_layers(fields: Fields, shape: Shape) -> tuple[Layer, ...]:
    """The layers that a configuration describes. Raises ConfigError for those that are not known here."""
    count = fields.number("num_hidden_layers")
    kinds = _kinds(fields, count)
    windows = _windows(fields, kinds)
    return tuple(_layer(fields, number, kinds[number], windows[number], shape) for number in range(count))


def _kinds(fields: Fields, count: int) -> list[str]:
    """The kind of each layer, as configurations name it."""
    named = fields.get("layer_types", fields.get("layers_block_type"))
    if named is None:
        return _unnamed_kinds(fields, count)
    if not isinstance(named, list) or len(named) != count:
        raise fields.wrong(f"layer_types does not name {count} layers: correct its configuration")
    kinds = [str(kind) for kind in named]
    if strange := sorted(set(kinds) - _ATTENTION - _RECURRENT):
        raise _unknown_kind(fields, ", ".join(strange))
    return kinds


def _unnamed_kinds(fields: Fields, count: int) -> list[str]:
    """By the rule of the family, for a configuration that does not name the kind of each layer."""
    recurrent, attention = "mamba", set(range(count))
    if fields.get("linear_num_value_heads"):
        interval = max(1, fields.number("full_attention_interval", 4))
        recurrent, attention = "linear_attention", set(range(interval - 1, count, interval))
    elif fields.get("conv_L_cache"):
        recurrent, attention = "conv", set(fields.numbers("full_attn_idxs")) or attention
    elif fields.get("attn_layer_period"):
        attention = set(range(fields.number("attn_layer_offset", 0), count, fields.number("attn_layer_period")))
    elif fields.get("attn_layer_indices") is not None:
        attention = set(fields.numbers("attn_layer_indices"))
    elif found := [key for key in _OTHER_FAMILIES if fields.get(key)]:
        raise _unknown_kind(fields, f"the family with {found[0]}")
    return ["full_attention" if number in attention else recurrent for number in range(count)]


def _unknown_kind(fields: Fields, what: str) -> ConfigError:
    known = "attention, and the states of Qwen3-Next, Qwen3.5, LFM2, Granite 4, Bamba and Jamba"
    return fields.wrong(f"its layers of {what} are not known here: known are {known}")


def _windows(fields: Fields, kinds: list[str]) -> list[int]:
    """How far back each layer looks, 0 for all: by their kinds, from a pattern, or the same for all layers."""
    window, count = fields.number("sliding_window", 0), len(kinds)
    if fields.get("layer_types") is not None:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if not window or fields.get("use_sliding_window") is False:
        return [0] * count
    if pattern := fields.number("sliding_window_pattern", 0):  # the last of that many layers sees everything
        return [0 if (number + 1) % pattern == 0 else window for number in range(count)]
    first = fields.number("max_window_layers", 0) if fields.get("use_sliding_window") else 0
    return [window if number >= first else 0 for number in range(count)]


def _layer(fields: Fields, number: int, kind: str, window: int, shape: Shape) -> Layer:
    total, active, experts = _feed_forward(fields, number, shape.hidden)
    if kind in _RECURRENT:
        mixer = recurrent_mixer(fields, kind, shape.hidden)
        if mixer is None:
            raise _unknown_kind(fields, kind)
        weights = mixer.parameters
        return Layer(0, weights + total, weights + active, experts, 0, mixer.state, mixer.state_flops_per_token)
    attention, pair_flops = _attention(fields, shape)
    return Layer(window, attention + total, attention + active, experts, pair_flops)


def _attention(fields: Fields, shape: Shape) -> tuple[int, int]:
    """Weights of attention, and work for a pair of tokens in a prefill."""
    if rank := fields.number("kv_lora_rank", 0):
        return _latent_attention(fields, shape.hidden, shape.heads, rank)
    family = str(fields.get("model_type", ""))
    gated = fields.get("attn_output_gate", family.startswith(("qwen3_next", "qwen3_5")))
    queries = shape.hidden * shape.heads * shape.head_dim
    keys = shape.hidden * shape.kv_heads * shape.head_dim
    return (3 if gated else 2) * queries + 2 * keys, 4 * shape.heads * shape.head_dim


def _latent_attention(fields: Fields, hidden: int, heads: int, rank: int) -> tuple[int, int]:
    """The same for multi-head latent attention."""
    nope, rope, value = (fields.number(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank = fields.number("q_lora_rank", 0)
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    latent = hidden * (rank + rope) + rank * heads * (nope + value)
    return query + latent + heads * value * hidden, 2 * heads * (nope + rope + value)


def _feed_forward(fields: Fields, number: int, hidden: int) -> tuple[int, int, int]:
    """Weights of a layer after its attention: all, those used for a token, those of experts."""
    experts = next(
        (fields.number(key) for key in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(key)), 0
    )
    always = 3 * hidden * fields.number("shared_intermediate_size", 0)  # Granite's, beside experts or alone
    if experts < 2 or not _has_experts(fields, number):
        dense = always or 3 * hidden * _inner(fields)
        return dense, dense, 0
    one = 3 * hidden * (fields.number("moe_intermediate_size", 0) or _inner(fields))
    chosen = fields.number("num_experts_per_tok")
    shared = always + one * fields.number("n_shared_experts", 0) + hidden * experts
    if size := fields.number("shared_expert_intermediate_size", 0):
        shared += 3 * hidden * size + hidden
    return shared + one * experts, shared + one * chosen, one * experts


def _has_experts(fields: Fields, number: int) -> bool:
    """True if this layer of a mixture of experts has them."""
    first = max(fields.number("first_k_dense_replace", 0), fields.number("num_dense_layers", 0))
    if number < first or number in fields.numbers("mlp_only_layers"):
        return False
    if period := fields.number("expert_layer_period", 0):
        return number % period == fields.number("expert_layer_offset", 0)
    step = fields.number("decoder_sparse_step", 0)
    return not step or (number + 1) % step == 0


def _inner(fields: Fields) -> int:
    """Channels between the matrices of a layer's MLP."""
    inner = fields.number("block_ff_dim", 0) or fields.number("intermediate_size")
    if not fields.get("block_auto_adjust_ff_dim", fields.get("model_type") == "lfm2"):
        return inner
    factor: Any = fields.get("block_ffn_dim_multiplier", 1.0)
    if not isinstance(factor, int | float):
        raise fields.wrong(f"block_ffn_dim_multiplier is {factor!r}, no number: correct its configuration")
    return round_up(int(factor * int(2 * inner / 3)), max(1, fields.number("block_multiple_of", 256)))
