"""The seam to the tier below DRAM."""

from __future__ import annotations

from typing import Protocol

from tiercache.daemon.index import Table


class TierBelow(Protocol):
    """What the DRAM tier asks of the tier below it. Answers come from memory; nothing blocks."""

    name: str

    def blocks_after(self, tables: list[Table], keys: bytes, first: int) -> int:
        """How many blocks of the run that goes on at key `first` this tier has."""


class NoTierBelow:
    """DRAM is the last tier: what is evicted is gone."""

    name = ""

    def blocks_after(self, tables: list[Table], keys: bytes, first: int) -> int:
        return 0
