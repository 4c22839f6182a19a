"""What an engine can be told: one frozen object, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
WRITE_MODES = ("through", "back")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine`. Raises ConfigError when a value is wrong.

    Attributes:
        block_size: tokens in a KV block, the unit of caching.
        chunk_size: tokens of a prefill chunk; chunk edges are its absolute multiples.
        pool_bytes: size of the KV pool. `pool_blocks`, where not 0, says it in blocks instead.
        max_sequences: sequences that may hold blocks at one time.
        step_tokens: prompt tokens that one step may compute, over all sequences; at least one
            chunk is always computed.
        max_context: longest sequence (prompt and output), 0 for what the model allows.
        device: `auto` takes CUDA where there is one.
        dtype: of weights and KV; `auto` takes what the model's config says.
        exact: blocks are reused only where the reuse cannot change one bit of the result (see
            `tiercache.engine.sequence`). Off: every full block with equal tokens is reused, those
            of generated tokens too, and results may differ in the last bits.
        write: `through` stores a block with the cache after the step that filled it; `back` when
            its place in the pool is about to be needed.
        clean_blocks: with `write="back"`, blocks kept ready for immediate use.
        load_timeout_s: a load that takes longer is given up and its tokens are computed.
        max_stores: store transfers in flight; more wait in the pool until one is done.
        salt: a tenant's secret. Engines with different salts share nothing.
    """

    block_size: int = 16
    chunk_size: int = 512
    pool_bytes: int = 1 << 30
    pool_blocks: int = 0
    max_sequences: int = 64
    step_tokens: int = 1024
    max_context: int = 0
    device: str = "auto"
    dtype: str = "auto"
    exact: bool = True
    write: str = "through"
    clean_blocks: int = 32
    load_timeout_s: float = 5.0
    max_stores: int = 64
    salt: str = ""

    def __post_init__(self) -> None:
        positive = ("block_size", "chunk_size", "pool_bytes", "max_sequences", "step_tokens", "max_stores")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in ("pool_blocks", "max_context", "clean_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be 0 or more")
        if self.chunk_size % self.block_size:
            raise ConfigError(
                f"chunk_size is {self.chunk_size}: must be a multiple of block_size {self.block_size}"
            )
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES), ("write", WRITE_MODES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if not self.load_timeout_s > 0:
            raise ConfigError(f"load_timeout_s is {self.load_timeout_s}: must be above 0")
