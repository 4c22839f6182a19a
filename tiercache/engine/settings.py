"""The settings of an engine: one frozen object, checked when it is created; and the clock that it is given.

Names and meanings are vLLM's where it has the setting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
WRITE_MODES = ("through", "back")
MAX_WAITING = 2048
"""A server's default for the prompts that may wait for their first token."""
STALL_TIMEOUT_S = 60.0
"""A server's default for the time without a step after which its engine counts as stalled."""
CHOICES = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "tier_dtype": KV_CACHE_DTYPES,
    "device": DEVICES,
    "write": WRITE_MODES,
}
_POSITIVE = ("block_size", "chunk_size", "max_num_seqs", "max_stores", "attention_sinks")
_NOT_NEGATIVE = ("max_model_len", "max_num_batched_tokens", "pool_blocks", "clean_blocks", "attention_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine`. Raises ConfigError when a value is wrong.

    Attributes:
        max_model_len: longest sequence (prompt and output), 0 for what the model allows and the pool holds.
        gpu_memory_utilization: share of a GPU's memory that weights and KV pool may take, the rest being
            left for activations; where `kv_cache_memory` is 0.
        kv_cache_memory: size of the KV pool, in bytes or as "4GiB". 0 is 1 GiB on a CPU, and what
            `gpu_memory_utilization` leaves on a GPU.
        block_size: tokens in a KV block, the unit of caching.
        max_num_seqs: sequences that may hold blocks at one time.
        max_num_batched_tokens: tokens that one step computes at most, those of decoding sequences
            included; 0 for one chunk of prefill beside `max_num_seqs` decoding sequences, which is
            the least.
        enable_prefix_caching: off, requests reuse nothing of each other; tiers only take in preempted ones.
        enable_chunked_prefill: off, a prompt is computed in one step, however long others wait meanwhile.
        kv_cache_dtype: form of the KV in the pool; `auto` is `dtype`, `fp8` is `fp8_e4m3`. The others hold two
            (fp8, int8) or three and a half times (int4) the tokens of 16 bits, and lose precision.
        tier_dtype: form of the KV in the cache's tiers; `auto` is that of the pool, another one needs a pool
            in `dtype` and 64 MiB beside it. What comes back is then not quite what was computed.
        dtype: of weights and KV; `auto` takes what the model's config says.
        tensor_parallel_size: GPUs that share a model; this engine runs on one device, so it is 1.
        attention_window: a token sees only this many up to itself, and the `attention_sinks`; 0: all. For endless
            chats, at the price of what lies between (see `tiercache.engine.torch_attention`). Layers that have a
            window of their own keep it.
        attention_sinks: with `attention_window`, first tokens that stay visible; rounded up to whole blocks.
        chunk_size: tokens of a prefill chunk; chunk edges are its absolute multiples.
        pool_blocks: size of the KV pool in blocks; not 0, it stands in for `kv_cache_memory`. Of a model that mixes
            windowed and full attention a block has the layers of one group (see `tiercache.engine.kv_pool`).
        device: `auto` takes CUDA where there is one.
        exact: blocks are reused only where the reuse cannot change one bit of the result (see
            `tiercache.engine.sequence`). Off: every full block with equal tokens is reused, those
            of generated tokens too, and results may differ in the last bits, or by what a quantised pool loses.
        write: `through` stores a block with the cache after the step that filled it; `back` when
            its place in the pool is about to be needed.
        clean_blocks: with `write="back"`, blocks kept ready for immediate use.
        load_timeout_s: a load that takes longer is given up and its tokens are computed; most are given
            up before, when computing would have been done (see `tiercache.connector.costs`).
        always_load: every hit is loaded, even where computing it would be faster: for measurements, which then depend
            on nothing that was measured before.
        max_stores: store transfers in flight; more wait in the pool until one is done.
        salt: a tenant's secret. Engines with different salts share nothing.
    """

    max_model_len: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | str = 0
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_dtype: str = "auto"
    tier_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    attention_window: int = 0
    attention_sinks: int = 4
    chunk_size: int = 512
    pool_blocks: int = 0
    device: str = "auto"
    exact: bool = True
    write: str = "through"
    clean_blocks: int = 32
    load_timeout_s: float = 5.0
    always_load: bool = False
    max_stores: int = 64
    salt: str = ""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be 0 or more")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        self._check_sizes()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}: must be above 0 and at most 1")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}: this engine runs on one device; set it to 1"
            )
        if self.tier_dtype != "auto" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"tier_dtype is {self.tier_dtype!r} and kv_cache_dtype {self.kv_cache_dtype!r}: blocks that are small "
                "in the pool go to the tiers as they are; set one of the two to 'auto'"
            )
        if not self.load_timeout_s > 0:
            raise ConfigError(f"load_timeout_s is {self.load_timeout_s}: must be above 0")

    def _check_sizes(self) -> None:
        if self.chunk_size % self.block_size:
            raise ConfigError(f"chunk_size is {self.chunk_size}: must be a multiple of block_size {self.block_size}")
        try:
            parse_bytes(self.kv_cache_memory)
        except ValueError as error:
            raise ConfigError(f"kv_cache_memory {error}") from error
        least = self.chunk_size + self.max_num_seqs
        if 0 < self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: must be at least {least}, a chunk_size of "
                f"{self.chunk_size} and one token for each of max_num_seqs {self.max_num_seqs}; raise it or lower those"
            )

    @property
    def quantised(self) -> bool:
        """True if the pool quantises full blocks."""
        return self.kv_cache_dtype != "auto"

    @property
    def sink_tokens(self) -> int:
        """`attention_sinks` in whole blocks; 0 without `attention_window`."""
        return -(-self.attention_sinks // self.block_size) * self.block_size if self.attention_window else 0

    @property
    def kv_cache_bytes(self) -> int:
        """`kv_cache_memory` as a number of bytes."""
        return parse_bytes(self.kv_cache_memory)

    @property
    def step_tokens(self) -> int:
        """The most tokens that one step computes; a prompt that may not be cut is computed whole even so."""
        return self.max_num_batched_tokens or self.chunk_size + self.max_num_seqs


class Clock:
    """The real time. An engine takes all of its time from one clock, so another one makes its decisions repeatable."""

    def now_s(self) -> float:
        """Seconds since some fixed point; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let that time pass."""
        time.sleep(seconds)
