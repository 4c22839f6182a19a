"""The store, as the parts of the shared tier see it: whether it may be asked, jobs for it, and what those tell.

lookups, fetches, writes, flushes ─ submit(job) ─► a line ─► the job's owner: job_ended ─► took_in
                                                                                              │
                      Breaker: is the store well?    Epochs, Presence: what notes say now ◄───┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.shared.stores.store import Connection, SharedStore, StoreError, StoreProblem

from .breaker import Breaker, BreakerState
from .epochs import Epochs, deadline
from .lines import JobOwner, Lines, LineUse, SharedJob, ThreadsafeCall
from .naming import Scope
from .presence import Presence
from .settings import SharedSettings
from .value import pack_of

log = logging.getLogger("tiercache.daemon")

LOOKUP_LINES = 2
CLOSE_S = 5.0
PROBE_S = 2.0
_NOT_THERE = StoreError(
    StoreProblem.PROTOCOL, "it says that it has blocks, and then has none of them: is it full, and evicts at random?"
)


class ProbeJob(SharedJob):
    """Reads the deployment's note."""

    def __init__(self, owner: JobOwner, note: bytes) -> None:
        super().__init__(owner)
        self._note = note

    def run(self, connection: Connection) -> None:
        """See `SharedJob`."""
        note = connection.exists((), (self._note,), deadline(PROBE_S)).notes[0]
        if note:
            self.learned[self._note] = note


class StoreAccess:
    """Event loop only. `soon()` asks for a slice of the tier's work before the next tick; `make_lines`: see `Lines`."""

    def __init__(
        self,
        settings: SharedSettings,
        soon: Callable[[], None],
        clock_s: Callable[[], float],
        make_lines: Callable[[SharedStore, list[tuple[LineUse, ...]], ThreadsafeCall], Lines] = Lines,
    ) -> None:
        self.settings = settings
        self.store = settings.store
        self.breaker = Breaker(clock_s)
        self.presence = Presence(clock_s)
        self.epochs = Epochs(settings.naming)
        self.soon = soon
        self.on_back: Callable[[], None] = lambda: None
        """Called when the store answers again after it was away."""
        self._make_lines = make_lines
        self._lines: Lines | None = None
        self._space: Space | None = None
        self._closing = False

    def attach(self, space: Space) -> None:
        """The namespaces that notes are about are those of this space."""
        self._space = space

    def open(self) -> None:
        """Start the lines. The store need not be there."""
        transfers = max(1, self.store.connections)
        uses: list[tuple[LineUse, ...]] = [(LineUse.LOOKUP,)] * LOOKUP_LINES
        writers = max(1, transfers // 2)
        both, fetch = (LineUse.FETCH, LineUse.WRITE), (LineUse.FETCH,)
        uses += [both if number < writers else fetch for number in range(transfers)]
        self._lines = self._make_lines(self.store, uses, asyncio.get_running_loop().call_soon_threadsafe)

    async def close(self) -> None:
        """End the lines, and take in what their last jobs tell."""
        if self._lines is None:
            return
        self._closing = True
        await asyncio.get_running_loop().run_in_executor(None, self._lines.stop, time.monotonic() + CLOSE_S)
        while self._lines.waiting:
            self._lines.deliver()
        self.store.close()

    @property
    def opened(self) -> bool:
        """True from `open` on, also after `close`."""
        return self._lines is not None

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._lines is not None and not self._closing

    @property
    def away(self) -> bool:
        """True if nothing should be asked of the store now."""
        return not self.is_open or not self.breaker.closed

    # --- names -----------------------------------------------------------------------------------

    def scope_of(self, namespace: Namespace, root: bytes) -> Scope:
        """The scope of a chain that begins with `root`."""
        return Scope(namespace.fingerprint, self.epochs.naming.bucket(root))

    def pack_of(self, namespace: Namespace) -> int:
        """How many blocks of this namespace are one value."""
        return 1 if namespace.table.windowed else pack_of(namespace.spec.block_bytes, self.store.pack_blocks)

    # --- jobs ------------------------------------------------------------------------------------

    def submit(self, job: SharedJob, use: LineUse) -> None:
        """Queue a job. One that moves blocks is given up if the store goes away before its turn."""
        assert self._lines is not None
        if use is not LineUse.LOOKUP:
            job.given_up = self._is_away
        self._lines.submit(job, use)

    def _is_away(self) -> bool:
        """True if the breaker is open. Any thread: this only reads one field."""
        return not self.breaker.closed

    def probe(self) -> None:
        """Try the store."""
        self.submit(ProbeJob(self, self.epochs.naming.deployment_note), LineUse.LOOKUP)

    def job_ended(self, job: Any) -> None:
        """See `JobOwner`: of probes and fetches."""
        self.took_in(job)

    # --- what jobs tell --------------------------------------------------------------------------

    def took_in(self, job: SharedJob) -> None:
        """Take in the notes that a job has read, and whether the store is well."""
        self.notes_changed(self.epochs.learn(job.learned))
        if job.problem is not None:
            self.failed(job.problem, type(job))
        elif not job.idle:
            self.worked(type(job))

    def notes_changed(self, notes: Sequence[bytes]) -> None:
        """A flush has reached the store, from any host, or the store has lost notes."""
        if not notes or self._space is None:
            return
        about = {self.epochs.naming.fingerprint_of(note) for note in notes}
        self.presence.forget(None if "" in about else self._space.numbers(about).values())

    def kept_word(self, kept: bool) -> None:
        """Blocks have arrived, or nothing of a prompt of which the store said that it has some."""
        if kept:
            self.worked(Claim)
        else:
            self.failed(_NOT_THERE, Claim)

    def worked(self, kind: object) -> None:
        """A job of this kind has worked."""
        was = self.breaker.state
        self.breaker.worked(kind)
        self._may_be_back(was)

    def failed(self, error: StoreError, kind: object) -> None:
        """A job of this kind has failed. At the end that says nothing: its line was cut off."""
        if self._closing:
            return
        was = self.breaker.state
        if self.breaker.failed(error, kind):
            log.error("the shared store %s is away: %s", self.store.address, error.text)
            self.presence.drop_claims()
        self._may_be_back(was)  # one that is full, or takes no writes, answers

    def _may_be_back(self, was: BreakerState) -> None:
        if was is BreakerState.HALF_OPEN and self.breaker.closed:
            log.warning("the shared store %s answers again", self.store.address)
            self.presence.drop_claims()
            self.on_back()
