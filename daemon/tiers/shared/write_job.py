"""Values on their way to the store: a thread seals them and sends those that the store lacks.

exists + notes ─► are the names the present ones? ─► seal, put, a few at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Put

from .epochs import EPOCH_TRIES, EpochReader, Epochs, StaleEpoch, deadline
from .lines import JobOwner, SharedJob
from .memory import frame_view, thread_scratch
from .naming import Scope
from .value import ValueForm

WRITE_S = 10.0
"""Deadline of a job, beside the time that its bytes may take."""
BYTES_TOGETHER = 4 << 20
"""Values sent in one call, unless one is larger."""


class SharedWrite(NamedTuple):
    """One block of a value, with its frame held."""

    namespace: Namespace
    key: bytes
    frame: int
    address: int


class ValueWrite(NamedTuple):
    """One value: a block, or a pack of blocks, named by the last one."""

    scope: Scope
    blocks: Sequence[SharedWrite]
    ttl_s: float
    overwrite: bool


class WriteJob(SharedJob):
    """Sends values that the store lacks."""

    def __init__(
        self,
        owner: JobOwner,
        form: ValueForm,
        epochs: Epochs,
        values: Sequence[ValueWrite],
        generations: Sequence[int],
    ) -> None:
        super().__init__(owner)
        self.values = values
        self.generations = generations
        self.fates = [Fate.UNKNOWN] * len(values)
        self.outdated = [False] * len(values)
        """Of each value, whether a host has flushed since its frames were held: it may be what was flushed."""
        self.sent_bytes = [0] * len(values)
        self._form = form
        self._epochs = epochs
        self._begun = {value.scope: epochs.of(value.scope) for value in values}
        self._flushes = epochs.flushes

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        until_s = deadline(WRITE_S, sum(map(self._room, self.values)))
        reader = EpochReader(self._epochs, [value.scope for value in self.values])
        try:
            if self.given_up():
                self.idle = True
                return
            if not reader.complete:
                reader.read(connection, until_s)
            for _ in range(EPOCH_TRIES):
                names = [self._name(value, reader) for value in self.values]
                there, notes = connection.exists(names, reader.names, until_s)
                if reader.check(notes):  # else they would go where no host looks any more
                    self._put(connection, names, there, reader, until_s)
                    return
                if not reader.complete:
                    reader.read(connection, until_s)
        except StaleEpoch:
            self.idle = True
        finally:
            self.learned = reader.learned

    def _put(
        self, connection: Connection, names: list[bytes], there: list[bool], reader: EpochReader, until_s: float
    ) -> None:
        """A few values at a time, so that the scratch space stays small."""
        lacking = list[int]()
        for number, value in enumerate(self.values):
            if self._is_outdated(value.scope, reader):
                self.outdated[number] = True
            elif there[number] and not value.overwrite:
                self.fates[number] = Fate.DONE
            else:
                lacking.append(number)
        while lacking:
            some, size_bytes = list[int](), 0
            while lacking and (not some or size_bytes + self._room(self.values[lacking[0]]) <= BYTES_TOGETHER):
                size_bytes += self._room(self.values[lacking[0]])
                some.append(lacking.pop(0))
            scratch = thread_scratch().get(size_bytes if self._form.sealed else 0)
            puts, at = list[Put](), 0
            for number in some:
                value = self.values[number]
                puts.append(Put(names[number], self._parts(value, reader, scratch[at:]), value.ttl_s))
                at += self._room(value)
            try:
                connection.put(puts, (), until_s)
            finally:
                for number, put in zip(some, puts, strict=True):
                    self.fates[number] = put.fate
                    self.sent_bytes[number] = sum(map(len, put.parts))

    def _is_outdated(self, scope: Scope, reader: EpochReader) -> bool:
        begun = self._begun[scope]
        return self._epochs.flushes != self._flushes if begun is None else reader.of(scope) != begun

    def _room(self, value: ValueWrite) -> int:
        return sum(self._form.body_bytes(block.namespace.spec.block_bytes) for block in value.blocks)

    def _name(self, value: ValueWrite, reader: EpochReader) -> bytes:
        return self._epochs.naming.block(value.scope, reader.of(value.scope), value.blocks[-1].key)

    def _parts(self, value: ValueWrite, reader: EpochReader, scratch: memoryview) -> list[memoryview | bytes]:
        form, naming = self._form, self._epochs.naming
        epoch, parts, at = reader.of(value.scope), list[memoryview | bytes](), 0
        for block in value.blocks:
            length = block.namespace.spec.block_bytes
            whose = naming.identity(value.scope, epoch, block.key, length)
            room = form.body_bytes(length)
            header, body = form.pack(whose, frame_view(block.address, length), scratch[at : at + room])
            at += room
            parts += [header, body]
            if len(value.blocks) > 1 and len(body) < room:
                parts.append(bytes(room - len(body)))  # blocks of a pack are found by their place
        return parts
