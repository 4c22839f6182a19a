"""How much of a model's KV each tier holds, and when loading it is faster than computing it: the figures of `plan`.

Work is `Model.prefill_flops` over the share of their data sheet that the GPUs reach. A load is its bytes over the
slowest link on the way: each GPU's bus for its own part, host memory for all parts, the disks or the network for stored
bytes. A shared store takes two round trips more: a look-up, and the fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, round_up
from tiercache.plan.known import Gpu
from tiercache.plan.model import KV_DTYPES, Model
from tiercache.protocol.namespaces import FRAME_ALIGNMENT_BYTES

ROUND_TRIPS = 2
"""Of a hit in the shared store: the look-up, which may take a second one for a long prompt, and the fetch."""
BLOCK_TOKENS = 16
"""Of a block, unless the command line names another size or the model has states."""
LONGEST_TOKENS = 1 << 20
"""Of a prompt, for a model that names no limit."""


@dataclass(frozen=True)
class Plant:
    """The hardware for the model. Bandwidths in bytes/s: the bus of each GPU, the total of host memory, disks and the
    network to the shared store.
    """

    gpu: Gpu
    gpus: int
    utilization: float
    overhead_bytes: int
    weights_bytes: int
    mfu: float
    dram_bytes: int
    nvme_bytes: int
    dram_bytes_per_s: float
    nvme_bytes_per_s: float
    shared_bytes: int = 0
    shared_bytes_per_s: float = 1.25e9
    shared_round_trip_s: float = 0.0005


@dataclass(frozen=True)
class Form:
    """The KV of a model in blocks of `block_size` tokens, on `gpus` GPUs."""

    model: Model
    dtype: str
    block_size: int
    gpus: int

    def layer_bytes(self) -> int:
        """Bytes of a block of one layer on one GPU."""
        return self.model.layer_block_bytes(self.dtype, self.block_size, self.model.heads_per_gpu(self.gpus))

    @property
    def gpu_block_bytes(self) -> int:
        """Bytes of a block on one GPU, all layers that have KV."""
        return self.layer_bytes() * len(self.model.kv_layers)

    @property
    def stored_parts(self) -> int:
        """Number of GPUs that store a part of each block: a latent is the same on all, and stored once."""
        return 1 if self.model.latent else self.gpus

    @property
    def tier_block_bytes(self) -> int:
        """Bytes of a block in a tier: frames are whole pages, one for each GPU's part."""
        return round_up(self.gpu_block_bytes, FRAME_ALIGNMENT_BYTES) * self.stored_parts

    @property
    def state_gpu_bytes(self) -> int:
        """Bytes of a sequence's state on one GPU, all recurrent layers."""
        return self.model.state_gpu_bytes(self.gpus)

    @property
    def tier_state_bytes(self) -> int:
        """Bytes of a state in a tier, which keeps one for each stored prompt."""
        return round_up(self.state_gpu_bytes, FRAME_ALIGNMENT_BYTES) * self.stored_parts

    def tier_sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence in a tier: all its blocks, those before a window too, and one state."""
        return -(-tokens // self.block_size) * self.tier_block_bytes + self.tier_state_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of KV of one token, over all GPUs, each part counted once."""
        whole = Form(self.model, self.dtype, self.block_size, 1)
        return whole.gpu_block_bytes / self.block_size

    def sequence_blocks(self, tokens: int, window: int) -> int:
        """Blocks that one layer needs of a sequence; a window may begin within a block."""
        blocks = -(-tokens // self.block_size)
        return min(blocks, -(-window // self.block_size) + 1) if window else blocks

    def sequence_gpu_bytes(self, tokens: int) -> int:
        """Bytes of a sequence on one GPU: its KV, for layers with a window only the KV within it, and one state."""
        blocks = sum(self.sequence_blocks(tokens, layer.window) for layer in self.model.kv_layers)
        return blocks * self.layer_bytes() + self.state_gpu_bytes


def usual_block_size(model: Model, dtype: str, gpus: int) -> int:
    """Tokens in a block. For a model with states as vLLM chooses: the fewest with which a layer's block of attention is
    not smaller than a layer's state.
    """
    layer_bytes = Form(model, dtype, BLOCK_TOKENS, gpus).layer_bytes()
    state_bytes = max((layer.state.gpu_bytes(gpus) for layer in model.layers if layer.state is not None), default=0)
    return BLOCK_TOKENS * max(1, -(-state_bytes // layer_bytes))


def plan(model: Model, form: Form, plant: Plant, lengths: list[int], tokens_per_s: float) -> dict[str, Any]:
    """All figures as a tree. Raises ConfigError if the model does not fit."""
    pool_bytes = _pool_bytes(form, plant)
    blocks = pool_bytes // form.gpu_block_bytes
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "layers": len(model.layers),
            "state_layers": len(model.layers) - len(model.kv_layers),
            "windowed_layers": sum(layer.window > 0 for layer in model.layers),
            "window_tokens": max(layer.window for layer in model.layers),
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "latent": model.latent,
            "max_tokens": model.max_tokens,
            "weights_bytes": plant.weights_bytes,
        },
        "kv": {
            "dtype": form.dtype,
            "block_size": form.block_size,
            "token_bytes": form.token_bytes,
            "gpu_block_bytes": form.gpu_block_bytes,
            "tier_block_bytes": form.tier_block_bytes,
            "formats": _formats(form),
        },
        "state": _state(form),
        "gpu": {
            "gpus": plant.gpus,
            "memory_bytes": plant.gpu.memory_bytes,
            "pool_bytes": pool_bytes,
            "pool_blocks": blocks,
            "pool_tokens": blocks * form.block_size,
        },
        "sequences": [_sequence(form, plant, pool_bytes, tokens) for tokens in lengths],
        "tiers": _tiers(form, plant, blocks, tokens_per_s),
        "loads": [_load(form, plant, tokens) for tokens in lengths],
        "shared": _shared(form, plant),
    }


def _state(form: Form) -> dict[str, Any] | None:
    """A state of all recurrent layers: its bytes, and the tokens whose KV takes as many."""
    if not form.state_gpu_bytes:
        return None
    whole_bytes = form.model.state_gpu_bytes(1)
    return {
        "bytes": whole_bytes,
        "gpu_bytes": form.state_gpu_bytes,
        "tier_bytes": form.tier_state_bytes,
        "as_tokens": round(whole_bytes / form.token_bytes),
    }


def _pool_bytes(form: Form, plant: Plant) -> int:
    """Bytes left for KV on each GPU, at least a block."""

    def left(gpus: int) -> int:
        usable = int(plant.gpu.memory_bytes * plant.utilization)
        return usable - plant.weights_bytes // gpus - plant.overhead_bytes

    if left(plant.gpus) >= form.gpu_block_bytes:
        return left(plant.gpus)
    more = plant.gpus
    while more < 64 and left(more) < form.gpu_block_bytes:
        more *= 2
    each = f"{format_bytes(plant.gpu.memory_bytes)} x {plant.utilization:g}"
    remedy = f"use --tensor-parallel-size {more}" if left(more) >= form.gpu_block_bytes else "use a larger --gpu"
    raise ConfigError(
        f"{form.model.name}: weights of {format_bytes(plant.weights_bytes)} on {plant.gpus} GPU(s) leave no room for "
        f"KV in {each}: {remedy}"
    )


def _formats(form: Form) -> list[dict[str, Any]]:
    """Bytes of a token in each format, and how many times as many tokens then fit."""
    raw = Form(form.model, "auto", form.block_size, 1).token_bytes
    found = []
    for dtype in KV_DTYPES if not form.model.latent else ("auto", "bf16"):
        try:
            token_bytes = Form(form.model, dtype, form.block_size, 1).token_bytes
        except ConfigError:
            continue  # a format without heads of this size
        found.append({"dtype": dtype, "token_bytes": token_bytes, "times_the_tokens": raw / token_bytes})
    return found


def _sequence(form: Form, plant: Plant, pool_bytes: int, tokens: int) -> dict[str, Any]:
    gpu_bytes = form.sequence_gpu_bytes(tokens)
    tier_bytes = form.tier_sequence_bytes(tokens)
    return {
        "tokens": tokens,
        "bytes": gpu_bytes * form.stored_parts,
        "in_gpu": pool_bytes // gpu_bytes,
        "in_dram": plant.dram_bytes // tier_bytes,
        "in_nvme": plant.nvme_bytes // tier_bytes,
        "in_shared": plant.shared_bytes // tier_bytes,
    }


def _tiers(form: Form, plant: Plant, gpu_blocks: int, tokens_per_s: float) -> list[dict[str, Any]]:
    sizes = {"dram": plant.dram_bytes, "nvme": plant.nvme_bytes, "shared": plant.shared_bytes}
    blocks = {"gpu": gpu_blocks, **{tier: size // form.tier_block_bytes for tier, size in sizes.items() if size}}
    return [
        {
            "tier": tier,
            "blocks": count,
            "tokens": count * form.block_size,
            "holds_s": count * form.block_size / tokens_per_s if tokens_per_s else None,
        }
        for tier, count in blocks.items()
    ]


def _load(form: Form, plant: Plant, tokens: int) -> dict[str, Any]:
    """Seconds to compute a prefix of that many tokens, and to load it from each tier."""
    gpu_bytes = form.sequence_gpu_bytes(tokens)
    all_bytes = gpu_bytes * form.stored_parts
    compute_s = form.model.prefill_flops(tokens) / (plant.gpu.flops * plant.mfu * plant.gpus)
    dram_s = max(gpu_bytes / plant.gpu.bus_bytes_per_s, gpu_bytes * plant.gpus / plant.dram_bytes_per_s)
    nvme_s = max(dram_s, all_bytes / plant.nvme_bytes_per_s)
    shared_s = max(dram_s, all_bytes / plant.shared_bytes_per_s) + ROUND_TRIPS * plant.shared_round_trip_s
    return {
        "tokens": tokens,
        "bytes": all_bytes,
        "flops": form.model.prefill_flops(tokens),
        "compute_s": compute_s,
        "dram_s": dram_s,
        "nvme_s": nvme_s,
        "shared_s": shared_s,
        "break_even_bytes_per_s": all_bytes / compute_s,
    }


def _shared(form: Form, plant: Plant) -> dict[str, Any] | None:
    """The network to the shared store, and the shortest prefix, in tokens, that comes sooner than it is computed."""
    if not plant.shared_bytes:
        return None
    return {
        "bytes_per_s": plant.shared_bytes_per_s,
        "round_trip_s": plant.shared_round_trip_s,
        "pays_from_tokens": _pays_from(form, plant),
    }


def _pays_from(form: Form, plant: Plant) -> int | None:
    """None if no prefix that the model takes pays. A longer prefix pays more: attention grows with its square."""

    def pays(blocks: int) -> bool:
        load = _load(form, plant, blocks * form.block_size)
        return bool(load["shared_s"] < load["compute_s"])

    low, high = 0, (form.model.max_tokens or LONGEST_TOKENS) // form.block_size
    if not high or not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * form.block_size
