"""Flush requests: what they cover, how much of them may wait for disks, what their answers and the log say."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.observe.traffic import PROBE_ENGINE
from tiercache.daemon.tiers.dram.below import FlushBelow
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import ErrorCode

from .context import Method, RequestContext, check_keys
from .sessions import Session

log = logging.getLogger("tiercache.daemon")

MAX_UNWRITTEN = 1024
"""Namespaces in flushes of one party that disks have yet to write, each counted as often as it was flushed. What waits
for a disk takes memory, and the flushes of others and all blocks to be written wait behind it."""
MAX_UNWRITTEN_OF_ALL = 32 * MAX_UNWRITTEN
"""The same for all parties together: each process of this host is one."""
_UNCONFIRMED = (
    "a disk that is full, hangs or was taken away has not confirmed the flush: its blocks may come back after a "
    "restart; flush again when it works, or restart the daemon if it is gone for good"
)
_KEPT = (
    "the shared store has not confirmed the flush: it is kept, across restarts too, and the store is told until it "
    "has; until then this host uses nothing of it, and other hosts may still find the blocks"
)
_NAMED = 8
"""Namespaces that a line of the log names."""


class FlushRequests:
    """Event loop only."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._cache = context.cache
        self._below = context.cache.below
        self._space = context.cache.space
        self._generation = context.generation
        self._unwritten = Unwritten()

    def methods(self) -> dict[type, Method]:
        """The method that answers each kind of request."""
        return {m.Flush: self._flush}

    def _flush(self, session: Session, request: m.Flush) -> Steps[m.Reply | None]:
        tiers = ["all", "dram", *self._below.tiers]
        if request.tier not in tiers:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"there is no tier {request.tier!r}: {', '.join(tiers)}")
        if request.key:
            check_keys(request.key, 1)
        if self._context.tenant and not request.namespaces:
            raise RequestRefused(ErrorCode.FORBIDDEN.value, "a tenant flushes its own namespaces: name them")
        named = bool(request.namespaces)
        if request.key and not named and "shared" in self._below.tiers and request.tier in ("all", "shared"):
            text = "other hosts of the shared store may have namespaces that this one does not know"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"{text}: name those of the prefix, or flush everything")
        namespaces = self._context.namespaces(request.namespaces) if named else self._space.all_namespaces()
        is_below = bool(self._below.tiers) and request.tier != "dram"
        if is_below:
            self._unwritten.check(session.party, len(namespaces))
        if self._cache.events is not None and not (named or request.key) and request.tier == "all":
            self._cache.events.cleared()
        self._cache.counters.flushes += 1
        self._cache.observers.flushed(namespaces, request.key, request.tier)
        identity, blocks, more = self._context.identity, 0, False

        def done(below_blocks: int, durable: bool) -> None:
            late = () if below is None or durable else below.unconfirmed
            _log_flush(session, request, namespaces, blocks, more, below_blocks, late)
            kept = _KEPT if "shared" in late else ""
            reply: m.Reply = m.Flushed(request.request_id, self._generation, blocks + below_blocks, more, kept)
            lost = below.lost if below is not None and kept else ""
            if lost:
                kept = f"the shared store has not confirmed the flush, and {lost}: flush again before this daemon ends"
            if "nvme" in late or lost:
                text = "; ".join(filter(None, (_UNCONFIRMED if "nvme" in late else "", kept)))
                reply = m.Error(request.request_id, self._generation, ErrorCode.UNCONFIRMED.value, text)
            self._context.answer(identity, session, reply)

        below = None
        in_dram = request.tier in ("all", "dram")
        try:
            if is_below:
                below = self._below.begin_flush(namespaces, request.key, done, named, request.tier)
                self._unwritten.add(session.party, below, len(namespaces))
            blocks, more = yield from self._cache.flush(namespaces, request.key, below, in_dram)
        except BaseException:
            log.warning("flush by %s failed half way: flush again", session.who)
            if below is not None:
                below.give_up()
            raise
        if below is None:
            _log_flush(session, request, namespaces, blocks, more, 0, ())
            return m.Flushed(request.request_id, self._generation, blocks, more)
        below.end()
        return None


class Unwritten:
    """The flushes of each party that disks may have yet to write, and how many namespaces they are about."""

    def __init__(self) -> None:
        self._of_party: dict[str, deque[tuple[FlushBelow, int]]] = {}
        self._namespaces: dict[str, int] = {}
        self._all = 0

    def check(self, party: str, namespaces: int) -> None:
        """Raises RequestRefused where too much waits for one more flush of so many namespaces.

        A flush of any size may begin when none of the party's earlier ones waits, and not too many of all others.
        """
        waiting = self._waiting(party)
        if waiting and waiting + namespaces > MAX_UNWRITTEN:
            text = f"earlier flushes of {waiting} namespaces by this client are not on disk yet: ask again later"
            raise RequestRefused(ErrorCode.LIMIT.value, text)
        if self._all >= MAX_UNWRITTEN_OF_ALL:
            self._forget_settled()
            if self._all >= MAX_UNWRITTEN_OF_ALL:
                text = f"flushes of {self._all} namespaces by all clients are not on disk yet: look at its health"
                raise RequestRefused(ErrorCode.LIMIT.value, text)

    def _waiting(self, party: str) -> int:
        """Namespaces in flushes from the oldest one on that is not settled."""
        flushes = self._of_party.get(party, deque())
        while flushes and flushes[0][0].settled:
            namespaces = flushes.popleft()[1]
            self._namespaces[party] -= namespaces
            self._all -= namespaces
        if not flushes:
            self._of_party.pop(party, None)
            self._namespaces.pop(party, None)
        return self._namespaces.get(party, 0)

    def add(self, party: str, flush: FlushBelow, namespaces: int) -> None:
        """A flush has begun."""
        if party not in self._of_party:
            self._forget_settled()  # each client that flushes once is a party of its own
        counted = max(1, namespaces)
        self._of_party.setdefault(party, deque()).append((flush, counted))
        self._namespaces[party] = self._namespaces.get(party, 0) + counted
        self._all += counted

    def _forget_settled(self) -> None:
        for party in list(self._of_party):
            self._waiting(party)


def _log_flush(
    session: Session,
    request: m.Flush,
    namespaces: Sequence[Namespace],
    dram: int,
    more: bool,
    below: int,
    late: Sequence[str],
) -> None:
    """Who has flushed what, for audits. A probe of the data path flushes its own block every few seconds."""
    is_probe = bool(namespaces) and all(one.spec.engine == PROBE_ENGINE for one in namespaces)
    where = "every namespace"
    if request.namespaces:
        named = ", ".join(f"{one.number} ({one.fingerprint[:8]})" for one in namespaces[:_NAMED])
        others = f" and {len(namespaces) - _NAMED} more" if len(namespaces) > _NAMED else ""
        where = f"namespace{'s' if len(namespaces) > 1 else ''} {named}{others}"
    what = "all blocks"
    if request.key:
        windowed = {one.table.windowed for one in namespaces}
        following = " and all that follow it" if windowed != {True} else ""
        limit = " (in windowed namespaces only that block)" if windowed == {True, False} else ""
        what = f"block {request.key.hex()}{following}{limit}"
    log.log(
        logging.DEBUG if is_probe else logging.INFO,
        "flush by %s: %s of %s, tier %s: %s%d blocks in DRAM, %d on NVMe%s",
        session.who,
        what,
        where,
        request.tier,
        "at least " if request.key and (more or below) else "",  # of what follows a block, as much as was unlinked
        dram,
        below,
        f"; not confirmed yet by: {', '.join(late)}" if late else "",
    )
