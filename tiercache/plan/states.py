"""Recurrent layers: the state that each keeps of a sequence however long it is, its weights and its work.

The shapes and types are those that vLLM allocates; the weights are counted as in transformers' model code.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.plan.fields import Fields

_FLOPS_PER_ELEMENT = 6
"""Of a state, for each token: it fades, takes the token in, and is read; a multiplication and an addition each."""


@dataclass(frozen=True)
class LayerState:
    """Bytes of a layer's state: those that GPUs share out, and those of groups, of which each GPU has at least one."""

    split_bytes: int
    group_bytes: int = 0
    groups: int = 0

    def gpu_bytes(self, gpus: int) -> int:
        """The part of each of so many GPUs."""
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
