"""Namespaces: everything that determines the form of a block's bytes.

Two blocks with equal keys hold the same tokens of the same model; only blocks of the same
namespace are the same *bytes*. A namespace is registered once per connection and is a small
integer on the wire from then on, so a hit of the wrong rank, dtype or layout cannot be expressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tiercache.config.setting_kinds import TENANT_NAME
from tiercache.ground.units import round_up

FRAME_ALIGNMENT_BYTES = 4096
MAX_BLOCK_BYTES = 256 << 20
TENANT = "tenant"
"""In `NamespaceSpec.extra`: the owner of these blocks. Each tenant has its own namespaces, and perhaps a quota."""
UNKNOWN_FIELD = "field:"
"""In `NamespaceSpec.extra`: prefix for the fields of a later release."""


class NamespaceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides how the bytes of a block are to be read.

    Attributes:
        engine: who wrote the bytes and which kernel layout they are for, e.g. `tiercache/1`.
        layout: axes of one block in order, e.g. `layer,2,slot,kv_head,head_dim`.
        dtype: element type as torch names it, e.g. `bfloat16`.
        block_size: tokens in a block.
        block_bytes: exact length of one block; frames are this rounded up to 4096.
        layers, kv_heads, head_dim: shape of this rank's part of the model.
        group: KV cache group of a hybrid model (`full`, `window`, `mamba`, ...).
        quantization: how values were compressed before the store, with the place of their scales.
        tp_rank, tp_size, pp_rank, pp_size: which shard of the model this is.
        window_blocks: 0 for groups that need the whole prefix. Otherwise blocks may be present
            without their parents, and a match at a cut means that the last `window_blocks`
            blocks before it are present (sliding windows, recurrent state).
        extra: anything else that changes the bytes. `tiers` = `dram` is for the daemon: it keeps such blocks
            in DRAM only.

    Specs of other processes are read by `received`, which keeps all fields that a later release may have.
    """

    engine: str
    layout: str
    dtype: str
    block_size: int
    block_bytes: int
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    group: str = "full"
    quantization: str = "none"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    window_blocks: int = 0
    extra: dict[str, str] = {}

    @classmethod
    def received(cls, fields: Mapping[str, Any]) -> NamespaceSpec:
        """The spec of a sender that may know more fields than we do. Raises msgspec.ValidationError.

        Dropping them would merge what the sender tells apart, so they go into `extra`, each as its bytes in msgpack.
        """
        known = {name: value for name, value in fields.items() if name in cls.__struct_fields__}
        spec = msgspec.convert(known, cls)
        try:
            unknown = {
                UNKNOWN_FIELD + name: msgspec.msgpack.encode(value, order="sorted").hex()
                for name, value in fields.items()
                if name not in known
            }
        except TypeError:  # such keys have no order, and two senders might send them in different ones
            raise msgspec.ValidationError("a spec has a key that is not text: fields have names") from None
        return msgspec.structs.replace(spec, extra={**spec.extra, **unknown}) if unknown else spec

    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when two specs are."""
        fields = msgspec.to_builtins(self)
        return hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).hexdigest()

    @property
    def tenant(self) -> str:
        """The owner of these blocks; empty where no tenant is named."""
        return self.extra.get(TENANT, "")

    def of_tenant(self, tenant: str) -> NamespaceSpec:
        """The same form, for blocks of a tenant."""
        if tenant == self.tenant:
            return self
        return msgspec.structs.replace(self, extra={**self.extra, TENANT: tenant})

    @property
    def frame_bytes(self) -> int:
        """Size of the arena frame that holds one block (the size class)."""
        return round_up(self.block_bytes, FRAME_ALIGNMENT_BYTES)

    @property
    def dram_only(self) -> bool:
        """True if blocks are kept out of the tiers below DRAM."""
        return self.extra.get("tiers") == "dram"

    def problem(self) -> str | None:
        """Why this spec cannot be served, or None. One line for the sender."""
        if not 0 < self.block_bytes <= MAX_BLOCK_BYTES:
            return f"block_bytes is {self.block_bytes}: must be 1 to {MAX_BLOCK_BYTES}"
        if self.block_size <= 0:
            return f"block_size is {self.block_size}: must be at least 1 token"
        if self.window_blocks < 0:
            return f"window_blocks is {self.window_blocks}: must be 0 (whole prefix) or more"
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            return "tp_rank and pp_rank must be at least 0 and below tp_size and pp_size"
        if self.tenant and not TENANT_NAME.fullmatch(self.tenant):
            return "a tenant's name has 1 to 64 letters, digits, and . _ - (not the first)"
        return None
