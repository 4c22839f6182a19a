"""Requests of operators and watchers: pins, prefetches, reports, models, checks, inspection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

import msgspec

from tiercache.config.settings import SETTINGS
from tiercache.daemon.cache import Cache
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.index.walks import path_to
from tiercache.daemon.tiers.dram.pins import ClientPins
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import ConfigError, RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import MAX_INSPECTED, MAX_LISTED_PINS, NO_LEASE, BlockView, ErrorCode, PinView

from .context import Method, RequestContext, check_keys, check_windows, encoder, positive
from .sessions import Session
from .store_waits import StoreWaits

log = logging.getLogger("tiercache.daemon")

MAX_CLIENT_COUNTERS = 64
MAX_COUNTER_NAME_BYTES = 32
MAX_MODELS_BYTES = 32 << 10
"""Model cards of one session, encoded: room for about a hundred LoRA adapters."""
MAX_LISTED_MODELS_BYTES = 1 << 20
"""Model cards of all sessions, in one reply."""
MODELS_AT_ONCE = 256
"""Models listed in one slice, about a millisecond: those of tenants are encoded for each request."""
MAX_LISTED_SPECS_BYTES = 1 << 20
MAX_FINDINGS = 1000
_PRIORITIES = (0, *(int(priority) for priority in m.Priority))
"""Valid priorities of a hint; 0 says nothing."""


_NAMESPACES_AT_ONCE = 256
_PINS_AT_ONCE = 256


class AdminRequests:
    """One method for each kind of request. Event loop only."""

    def __init__(self, context: RequestContext, store_waits: StoreWaits) -> None:
        self._context = context
        self._cache = context.cache  # for what concerns all of it: hints, checks, inspection
        self._reads = context.cache.reads
        self._client_pins = context.cache.reads.pins
        self._below = context.cache.below
        self._space = context.cache.space
        self._observers = context.cache.observers
        self._generation = context.generation
        self._store_waits = store_waits
        self._checking = False
        self._tasks: set[asyncio.Future[None]] = set()  # the loop itself keeps only weak references

    def methods(self) -> dict[type, Method]:
        """The method that answers each kind of request."""
        return {
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Prefetch: self._prefetch,
            m.Hint: self._hint,
            m.Report: self._report,
            m.Models: self._models,
            m.Check: self._check,
            m.Inspect: self._inspect,
            m.Pins: self._pins,
            m.Specs: self._specs,
            m.Settings: self._settings,
            m.ChangeSetting: self._change_setting,
        }

    def _pin(self, session: Session, request: m.Pin) -> Steps[m.Reply]:
        check_keys(request.keys, m.MAX_KEYS)
        ttl_s = min(positive(request.ttl_ms, "ttl_ms"), m.MAX_PIN_TTL_MS) / 1000
        namespaces = self._context.namespaces(request.namespaces)
        check_windows(namespaces, request.keys)
        blocks = yield from self._client_pins.pin(namespaces, request.keys, ttl_s)
        return m.Pinned(request.request_id, self._generation, blocks)

    def _unpin(self, session: Session, request: m.Unpin) -> m.Reply:
        check_keys(request.keys, m.MAX_KEYS)
        blocks = self._client_pins.unpin(self._context.namespaces(request.namespaces), request.keys)
        return m.Pinned(request.request_id, self._generation, blocks)

    def _prefetch(self, session: Session, request: m.Prefetch) -> Steps[m.Reply | None]:
        check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._context.namespaces(request.namespaces)
        check_windows(namespaces, request.keys)
        fetched = self._prefetched(session, request, namespaces)
        return (yield from self._store_waits.begin(session, request, namespaces, request.keys, fetched))

    def _prefetched(self, session: Session, request: m.Prefetch, namespaces: list[Namespace]) -> Steps[m.Reply]:
        found = yield from self._reads.prefetch(session.owner, namespaces, request.keys)
        self._observers.prefetched(namespaces, request.keys, found)
        return m.Matched(
            request.request_id, self._generation, found.dram, found.below, NO_LEASE, shared_blocks=found.shared
        )

    def _hint(self, session: Session, request: m.Hint) -> Steps[m.Reply]:
        check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._context.namespaces(request.namespaces)
        if request.first < 0 or request.return_in_ms < 0 or request.ttl_ms < 0:
            text = f"first {request.first}, return_in_ms {request.return_in_ms}, ttl_ms {request.ttl_ms}: from 0 on"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if request.priority not in _PRIORITIES:
            text = f"priority is {request.priority}: must be one of {', '.join(map(str, _PRIORITIES))}"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if request.done and request.return_in_ms:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, "done and return_in_ms: say one of them")
        said = hint_given_at(
            self._cache.clock_s(),
            request.done,
            min(request.return_in_ms, m.MAX_HINT_MS) / 1000,
            min(request.ttl_ms, m.MAX_HINT_MS) / 1000,
            m.Priority(request.priority) if request.priority else None,
        )
        blocks = yield from self._cache.hint(namespaces, request.keys, request.first, said)
        self._observers.hinted(namespaces, request)
        return m.Hinted(request.request_id, self._generation, blocks)

    def _named_or_all(self, numbers: Sequence[int]) -> list[Namespace]:
        return self._context.namespaces(numbers) if numbers else self._space.all_namespaces()

    def _report(self, session: Session, request: m.Report) -> m.Reply:
        if request.registration not in ("cuda", "mlock", "none") or len(request.counters) > MAX_CLIENT_COUNTERS:
            text = f"registration is cuda, mlock or none, with at most {MAX_CLIENT_COUNTERS} counters"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if any(len(name.encode()) > MAX_COUNTER_NAME_BYTES for name in request.counters):
            text = f"a counter's name is longer than {MAX_COUNTER_NAME_BYTES} bytes"  # all go into one `stats` reply
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if problem := next(filter(None, (card.problem() for card in request.models)), None):
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"a model card: {problem}")
        models = {encoder.encode(card): card for card in request.models}
        if sum(map(len, models)) > MAX_MODELS_BYTES:
            text = f"the models are described in more than {MAX_MODELS_BYTES} bytes: name fewer"
            raise RequestRefused(ErrorCode.TOO_LARGE.value, text)
        session.registration, session.counters, session.models = request.registration, request.counters, models
        return m.Done(request.request_id, self._generation)

    def _models(self, session: Session, request: m.Models) -> Steps[m.Reply]:
        models: dict[bytes, m.ModelCard] = {}
        left_bytes, looked = MAX_LISTED_MODELS_BYTES, 0
        for one in list(self._context.sessions.values()):
            if session.tenant not in ("", one.tenant):
                continue
            cards = announced_models(one) if one.tenant else one.models
            left_bytes -= sum(map(len, cards.keys() - models.keys()))
            if left_bytes < 0:
                break
            models |= cards
            looked += len(one.models)
            if looked >= MODELS_AT_ONCE:
                looked = 0
                yield
        known = self._space.numbers({name for card in models.values() for name in card.namespaces})
        windows = self._space.windows(known)
        return m.ModelList(request.request_id, self._generation, list(models.values()), known, windows)

    def _check(self, session: Session, request: m.Check) -> Steps[m.Reply | None]:
        if request.sample < -1 or request.bytes_per_s < 0:
            text = f"sample {request.sample}, bytes_per_s {request.bytes_per_s}: from 0, or sample -1 for all blocks"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if self._checking:
            raise RequestRefused(ErrorCode.LIMIT.value, "another check is under way: wait until it has ended")
        identity, below = self._context.identity, self._below
        self._checking = True
        try:
            findings = yield from self._cache.check()
            findings += yield from below.check()
        finally:
            self._checking = False
        blocks = sum(table.blocks for table in self._space.index.tables.values())
        blocks += sum(int(stats.get("blocks", 0)) for stats in below.stats_by_tier().values())
        if not request.sample:
            return self._checked(request, findings, blocks, 0)

        def done(bad: list[str], scanned: int) -> None:
            reply = self._checked(request, findings + bad, blocks, scanned)
            self._context.answer(identity, session, reply)

        if not below.local.scan(request.sample, request.bytes_per_s, lambda: session.open, done):
            raise RequestRefused(ErrorCode.LIMIT.value, "another check reads blocks: wait until it has ended")
        return None

    def _checked(self, request: m.Check, findings: list[str], blocks: int, scanned: int) -> m.CheckReply:
        for finding in findings[:MAX_FINDINGS]:
            log.error("check: %s", finding)
        if len(findings) > MAX_FINDINGS:
            findings = [*findings[:MAX_FINDINGS], f"{len(findings) - MAX_FINDINGS} more"]
        return m.CheckReply(request.request_id, self._generation, findings, blocks, scanned)

    def _inspect(self, session: Session, request: m.Inspect) -> Steps[m.Reply]:
        check_keys(request.key, 1)
        namespaces = self._named_or_all(request.namespaces)
        blocks = yield from places_of(self._cache, namespaces, request.key)
        # Only look into the namespaces that have the block.
        known = [self._space.namespaces[number] for number in dict.fromkeys(view.namespace for view in blocks)]
        chain = yield from chain_of(self._cache, known, request.key)
        packed = b"".join(chain) if request.chain else b""
        return m.Inspected(request.request_id, self._generation, blocks, len(chain), packed)

    def _pins(self, session: Session, request: m.Pins) -> Steps[m.Reply]:
        pins = self._client_pins
        views = yield from pins_of(pins, self._cache.clock_s())
        return m.PinList(request.request_id, self._generation, views, len(pins.leases), pins.limit_bytes)

    def _specs(self, session: Session, request: m.Specs) -> m.Reply:
        specs, left_bytes = {}, MAX_LISTED_SPECS_BYTES
        for namespace in self._context.namespaces(request.namespaces):
            left_bytes -= len(self._space.save(namespace))
            if left_bytes < 0:
                break
            specs[namespace.number] = msgspec.to_builtins(namespace.spec)
        return m.SpecList(request.request_id, self._generation, specs)

    def _settings(self, session: Session, request: m.Settings) -> m.Reply | None:
        identity, settings = self._context.identity, self._context.settings
        assert settings is not None

        async def answer() -> None:
            listed, problem = await settings.view()
            reply = m.SettingList(request.request_id, self._generation, listed, problem)
            self._context.answer(identity, session, reply)

        task = asyncio.ensure_future(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    def _change_setting(self, session: Session, request: m.ChangeSetting) -> m.Reply:
        settings = self._context.settings
        assert settings is not None
        try:
            note = settings.change(request.key, request.value)
        except ConfigError as error:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, str(error)) from None
        setting = SETTINGS[request.key]
        value = setting.kind.render(getattr(settings.config, setting.field))
        return m.Changed(request.request_id, self._generation, value, note)


def announced_models(session: Session) -> dict[bytes, m.ModelCard]:
    """What a tenant says about its models, in the daemon's numbering of its namespaces; others are left out."""
    known = session.registered
    cards = [card for card in session.models.values() if all(name in known for name in card.namespaces)]
    named = [msgspec.structs.replace(card, namespaces=[known[name] for name in card.namespaces]) for card in cards]
    return {encoder.encode(card): card for card in named}


# --- inspection: single blocks and pins, of which not even the recency changes -------------------------


def places_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> Steps[list[BlockView]]:
    """Every place of the block, those in DRAM first; at most MAX_INSPECTED."""
    here, below = list[BlockView](), list[BlockView]()
    for number, namespace in enumerate(namespaces, 1):
        view = _in_dram(cache, namespace, key)
        here += [] if view is None else [view]
        below += cache.below.local.places(namespace, key)
        if not number % _NAMESPACES_AT_ONCE:
            yield
    return (here + below)[:MAX_INSPECTED]


def _in_dram(cache: Cache, namespace: Namespace, key: bytes) -> BlockView | None:
    index = cache.space.index
    entry = namespace.table.get(key)
    if entry == NO_ENTRY:
        return None
    idle_s = cache.ages.age_s(index.columns.stamp[entry], cache.clock_s())
    length = namespace.spec.block_bytes
    return BlockView(
        namespace.number, "dram", "", length, index.children[entry], index.pins[entry], idle_s=round(idle_s, 3)
    )


def chain_of(cache: Cache, namespaces: Sequence[Namespace], key: bytes) -> Steps[list[bytes]]:
    """The keys from the first block to this one, as one of the tiers has them; empty if no tier knows the chain."""
    for namespace in namespaces:
        yield
        found = yield from path_to(cache.space.index, namespace.table, key)
        if not found:
            found = yield from cache.below.local.chain(namespace, key)
        if found:
            return found
    return []


def pins_of(pins: ClientPins, now_s: float) -> Steps[list[PinView]]:
    """The pins that end first, at most MAX_LISTED_PINS; without those that end meanwhile."""
    leases = nsmallest(MAX_LISTED_PINS, pins.leases.values(), attrgetter("deadline_s"))
    views = []
    for place, lease in enumerate(leases):
        if not place % _PINS_AT_ONCE:
            yield
        if lease.over:
            continue
        assert lease.pin_name is not None, "a pin has the name that it is ended by"
        numbers, key = lease.pin_name
        frame_bytes = sum(namespace.spec.frame_bytes for namespace in lease.namespaces)
        left_ms = max(0, int((lease.deadline_s - now_s) * 1000))
        views.append(PinView(list(numbers), key, lease.blocks, lease.blocks * frame_bytes, left_ms))
    return views
