"""A store in memory that tells how many values came with each put, for tests of the helper process: it runs there."""

from __future__ import annotations

from collections.abc import Sequence

from obedient_store import ObedientConnection, ObedientStore

from tiercache.daemon.tiers.shared.stores.store import Put

COUNTS = b"counts"


class CountingStore(ObedientStore):
    """The value COUNTS has a byte for each put."""

    def connect(self) -> ObedientConnection:
        return _CountingConnection(self)


class _CountingConnection(ObedientConnection):
    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        self._store.values[COUNTS] = self._store.values.get(COUNTS, b"") + bytes([len(values)])
        return super().put(values, notes, deadline_s)
