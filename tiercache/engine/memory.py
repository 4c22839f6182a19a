"""The size of the KV pool, and the longest sequence that fits into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch

from tiercache.copies.arena import available_bytes
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes

_MIB = 1 << 20
CPU_POOL_BYTES = 1 << 30


def count_pool_blocks(settings: EngineSettings, block_bytes: int, device: torch.device, tail_bytes: int = 0) -> int:
    """Number of blocks of the KV pool. Call it after the weights are loaded, since they take their memory first.

    `tail_bytes`, for tokens outside of blocks, are taken off the pool's memory; they come on top of `pool_blocks`.
    Raises ConfigError when the pool would hold no block or there is not enough memory.
    """
    wanted = settings.pool_blocks * block_bytes or settings.kv_cache_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        wanted = wanted or int(total * settings.gpu_memory_utilization) - (total - free)
        remedy = "raise gpu_memory_utilization, set kv_cache_memory or serve a smaller model"
    else:
        free = available_bytes()
        wanted = wanted or CPU_POOL_BYTES
        remedy = "raise kv_cache_memory"
    if not settings.pool_blocks:
        wanted -= tail_bytes
    if wanted < block_bytes:
        raise ConfigError(
            f"the KV pool would have {format_bytes(max(wanted, 0))}, and one block takes {format_bytes(block_bytes)}: "
            f"{remedy}"
        )
    if wanted > free:
        raise ConfigError(
            f"the KV pool takes {format_bytes(wanted)} of memory and {format_bytes(free)} are free: "
            "lower kv_cache_memory"
        )
    return wanted // block_bytes


def fit_model_len(
    settings: EngineSettings, allowed: int, block_bytes: int, num_blocks: int, most_blocks: Callable[[int], int]
) -> int:
    """The longest sequence that the engine serves: what the model allows, or less if the pool holds less.

    `most_blocks` gives the most blocks that a sequence of that many tokens holds. Raises ConfigError when the pool
    does not hold the settings' `max_model_len`, or no sequence at all.
    """
    if most_blocks(allowed) <= num_blocks:
        return allowed
    size = settings.block_size
    lengths = range(size, allowed + size, size)
    capacity = bisect_right(lengths, num_blocks, key=most_blocks) * size
    if 0 < capacity >= settings.max_model_len:
        return capacity
    needed = most_blocks(max(settings.max_model_len, 1))
    wanted = str(needed) if settings.pool_blocks else f"{-(-needed * block_bytes // _MIB)}MiB"
    raising = f"raise {pool_setting(settings)} to {wanted}"
    if not capacity:
        raise ConfigError(
            f"the KV pool has {num_blocks} blocks, and a sequence of one token takes {most_blocks(1)}, one for each "
            f"group of layers: {raising}"
        )
    raise ConfigError(
        f"max_model_len is {settings.max_model_len} and the KV pool holds {capacity} tokens: set max_model_len to "
        f"{capacity} at most, or {raising}"
    )


def pool_setting(settings: EngineSettings) -> str:
    """The setting that determines the size of the pool."""
    return "pool_blocks" if settings.pool_blocks else "kv_cache_memory"
