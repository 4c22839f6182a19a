"""The small tables of a closed directory, and what each row must agree with in them."""

from __future__ import annotations

import msgspec

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import sealed_bytes
from tiercache.daemon.tiers.nvme.catalog.database import CatalogState
from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, Row, segment_and_slot
from tiercache.daemon.tiers.nvme.disk.block_io import plausible_length
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.protocol.checksums import KINDS
from tiercache.protocol.namespaces import NamespaceSpec


class Tables:
    """Namespaces, tombstones and segments, as the database has them."""

    def __init__(self, state: CatalogState, segment_bytes: int) -> None:
        self.segments = dict(state.segments)
        self.lost_segments: list[int] = []
        """Segments whose blocks are lost, as the check of the files has found."""
        self.sequence = state.next_sequence - 1
        self._segment_bytes = segment_bytes
        self._namespaces: dict[int, tuple[NamespaceSpec, int]] = {}  # spec and oldest epoch by number
        for saved in state.namespaces:
            try:
                spec = msgspec.msgpack.decode(saved.spec, type=NamespaceSpec)
            except msgspec.MsgspecError:
                continue  # its rows are those of an unknown namespace
            if spec.problem() is None and spec.fingerprint() == saved.fingerprint:
                self._namespaces[saved.number] = spec, saved.epoch
        self._tombstones = {(stone.namespace, stone.key): stone.epoch for stone in state.tombstones}

    def fingerprint(self, namespace: int) -> str:
        """That of a known namespace."""
        return self._namespaces[namespace][0].fingerprint()

    def flushed_before(self, namespace: int, key: bytes) -> int:
        """The epoch of the last flush of this block by its key; 0 without one."""
        return self._tombstones.get((namespace, key), 0)

    def is_flushed(self, row: Row) -> bool:
        """Whether the block of a row in a known namespace was flushed."""
        return row.epoch < max(self._namespaces[row.namespace][1], self.flushed_before(row.namespace, row.key))

    def problem(self, place: int, row: Row) -> tuple[str, str] | None:
        """What cannot be true of a row, as a kind and in words."""
        return self._problem_of_place(place) or self._problem_of_content(place, row)

    def _problem_of_place(self, place: int) -> tuple[str, str] | None:
        segment, slot = segment_and_slot(place)
        slot_bytes = self.segments.get(segment)
        if place < 0 or slot_bytes is None or segment in self.lost_segments:
            return "rows outside segments", f"there is no segment {segment} in which it could be"
        offset = slot * PAGE_BYTES
        if offset % slot_bytes:
            return "overlapping rows", f"offset {offset} is no slot of {slot_bytes} bytes, so it overlaps others"
        if offset + slot_bytes > self._segment_bytes:
            return "rows outside segments", f"its slot at {offset} ends behind the segment"
        return None

    def _problem_of_content(self, place: int, row: Row) -> tuple[str, str] | None:
        known = self._namespaces.get(row.namespace)
        if known is None:
            return "unknown namespaces", f"namespace {row.namespace} is not known"
        spec, _ = known
        slot_bytes = self.segments[segment_and_slot(place)[0]]
        needed = sealed_bytes(spec.frame_bytes, spec.block_bytes) if row.codec & codecs.SEALED else spec.frame_bytes
        if slot_bytes not in (needed, sealed_bytes(spec.frame_bytes, spec.block_bytes)):
            wanted = f"blocks of its namespace need slots of {needed} bytes, these have {slot_bytes}"
            return "wrong slot sizes", wanted
        if row.length != spec.block_bytes:
            return "wrong lengths", f"{row.length} bytes, blocks of its namespace have {spec.block_bytes}"
        if spec.window_blocks and row.parent != ROOT_KEY:
            return "chains of windows", "a block of a windowed namespace names a block before it"
        if row.kind not in KINDS or not codecs.known(row.codec):
            return "unknown forms", f"codec {row.codec} or checksum kind {row.kind} is not known"
        if not plausible_length(row.codec, row.stored_length, row.length):
            return "wrong lengths", f"{row.stored_length} bytes are stored of a block of {row.length}"
        return None
