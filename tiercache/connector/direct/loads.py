"""Decides whether a connector reads and writes NVMe blocks directly, and implements the direct loads.

gds="auto"    wait for the daemon ─► probe its directories ─► worth it? ─► loader, else none
                                                          └► and asked for? ─► storer, else none
a load        blocks in DRAM by frames, then extents ─► loader ─► the rest by frames after all
a store       see `tiercache.connector.direct.stores`
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tiercache.client.client import Client
from tiercache.connector.blocks import Blocks, LeasedBlocks
from tiercache.connector.direct.backend import Backend, KvikioBackend
from tiercache.connector.direct.gds import DirectLoader, DirectStorer, block_seeds
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds
from tiercache.connector.direct.transfers import direct_problem
from tiercache.copies.pool import Pool
from tiercache.errors import ConfigError, ProtocolError, RequestRefused, TierCacheError
from tiercache.ground import forks
from tiercache.protocol.messages import KEY_BYTES, MAX_RESOLVE, BadExtent, Extents, unpack_extents
from tiercache.protocol.namespaces import NamespaceSpec

OFF, AUTO = "off", "auto"
LOOK_S = 0.2
"""How often to check whether the daemon is there to be asked for its directories."""
MODES = {Mode.POSIX: 0, Mode.COMPAT: 1, Mode.GDS: 2}
"""Values of the counter `direct_mode`: counters are numbers. 3 is any other backend."""
OTHER_MODE = 3
RATES: dict[str, Callable[[GdsProbe], float]] = {
    "direct_mb_per_s": lambda probe: probe.direct_bytes_per_s,
    "bounce_mb_per_s": lambda probe: probe.bounce_bytes_per_s,
    "direct_write_mb_per_s": lambda probe: probe.direct_write_bytes_per_s,
    "bounce_write_mb_per_s": lambda probe: probe.bounce_write_bytes_per_s,
}

logger = logging.getLogger("tiercache.gds")


class DirectPath:
    """One connector's direct path, decided for each direction by itself. Thread-safe.

    Args:
        wish: `off`, `auto`, or a backend to use as it is.
        stores: whether to write blocks directly too.

    Attributes:
        wanted: whether matches ask for extents.
        loader, storer: used for direct loads and stores, once that is decided.
        probes: results of the probes for `auto`.
        reason, store_reason: why there is no loader, no storer.
    """

    def __init__(
        self, client: Client, spec: NamespaceSpec, pool: Pool | None, wish: str | Backend, stores: bool = False
    ) -> None:
        if isinstance(wish, str) and wish not in (OFF, AUTO):
            raise ConfigError(f"gds is {wish!r}: choose {OFF!r} or {AUTO!r}")
        if stores and wish == OFF:
            raise ConfigError(f"gds_store is set and gds is {OFF!r}: choose gds={AUTO!r}, or leave gds_store out")
        self.loader: DirectLoader | None = None
        self.storer: DirectStorer | None = None
        self.probes: list[GdsProbe] = []
        self.reason = "it was not asked for" if wish == OFF else "it is being probed"
        self.store_reason = self.reason if stores else "it was not asked for"
        self._client = client
        self._spec = spec
        self._pool = pool
        self._stores = stores
        self._closed = threading.Event()
        forks.watch(self, "_closed")
        # A process without a pool only matches; those that load decide what they do with the match.
        self._asks = wish != OFF and pool is None
        if wish == OFF or pool is None:
            return
        problem = direct_problem(pool)
        if isinstance(wish, str) and pool.device == "cpu":
            problem = "no cuda: the pool is on the CPU"
        if problem:
            self._give_up(problem, problem)
        elif isinstance(wish, str):
            threading.Thread(target=self._decide, name="tiercache-gds-probe", daemon=True).start()
        else:
            self._use(wish, loads=True, stores=stores)

    @property
    def wanted(self) -> bool:
        """True if a match should leave blocks on NVMe for us."""
        return self._asks or (self.loader is not None and not self.loader.off)

    def counters(self) -> dict[str, int]:
        """Counts, the mode, and the rates measured at the start, in MB/s."""
        used = [one for one in (self.loader, self.storer) if one is not None]
        if not used and not self.probes:
            return {}
        counts = {
            "direct_mode": max((MODES[probe.mode] for probe in self.probes), default=OTHER_MODE),
            "direct_in_use": int(self.loader is not None and not self.loader.off),
            "direct_store_in_use": int(self.storer is not None and not self.storer.off),
        }
        for name, rate in RATES.items():
            counts[name] = int(min(map(rate, self.probes), default=0) / 1e6)
        for one in used:
            counts |= one.counters
        return counts

    # --- deciding --------------------------------------------------------------------------------

    def _give_up(self, reason: str, store_reason: str) -> None:
        """Log for each direction why it is not used; an empty reason logs nothing."""
        if reason:
            self.reason = reason
            logger.warning("blocks on NVMe are read by the daemon, not directly: %s", reason)
        if store_reason and self._stores:
            self.store_reason = store_reason
            logger.warning("blocks are stored in DRAM, not directly on NVMe: %s", store_reason)

    def _use(self, backend: Backend, *, loads: bool, stores: bool) -> None:
        assert self._pool is not None
        if loads:
            loader = DirectLoader(self._pool, backend)
            # From now on new blocks are written so that the GPU can verify them.
            self._client.expect(self._spec, direct=True)
            if self._client.alive:
                try:
                    self._client.session().namespace_id(self._spec, direct=True)
                except TierCacheError as error:
                    logger.debug("the daemon hears of direct reads with the next session: %s", error)
            self.loader, self.reason = loader, ""
        if stores:
            self.storer, self.store_reason = DirectStorer(self._pool, backend), ""
        if self._closed.is_set():
            self.close()

    def _decide(self) -> None:
        """Probe, in a thread: it takes seconds, and the engine serves meanwhile."""
        directories = self._directories()
        if not directories:
            return
        self.probes = [probe_gds(directory) for directory in directories]
        loads = all(probe.use_direct for probe in self.probes)
        stores = self._stores and all(probe.use_direct_store for probe in self.probes)
        self._give_up(
            "" if loads else next(probe.why_not for probe in self.probes if not probe.use_direct),
            "" if stores else next((probe.why_not_store for probe in self.probes if not probe.use_direct_store), ""),
        )
        if not loads and not stores:
            return
        assert self._pool is not None
        worst = min(self.probes, key=lambda probe: MODES[probe.mode])
        try:
            self._use(KvikioBackend(worst, self._pool.device), loads=loads, stores=stores)
        except ConfigError as error:
            self._give_up(str(error), str(error))

    def _directories(self) -> list[str]:
        """The daemon's NVMe directories, once it is there and has opened them; none when closed before."""
        while not self._closed.wait(LOOK_S):
            if not self._client.alive:
                continue
            try:
                tiers: dict[str, Any] = self._client.stats()["tiers"]
            except TierCacheError as error:
                logger.debug("the daemon did not name its directories: %s", error)
                continue
            if "nvme" not in tiers:
                self._give_up("the daemon has no NVMe directories", "the daemon has no NVMe directories")
                return []
            if found := [str(one["path"]) for one in tiers["nvme"]["directories"] if one["state"] in ("loading", "ok")]:
                return found
        return []

    def close(self) -> None:
        """End the probing, the loader and the storer."""
        self._closed.set()
        for one in (self.loader, self.storer):
            if one is not None:
                one.close()


def load_direct(leased: LeasedBlocks, loader: DirectLoader, fingerprint: str, keys: bytes, blocks: Blocks) -> int:
    """Read leased blocks from their extents into the pool's; returns how many leading ones came.

    Args:
        fingerprint: the namespace's.
        keys: of the whole run, from the root: the blocks are verified against them.

    Raises TierCacheError; no read is in progress then, except for CopyLost.
    """
    session, lease, namespace_id = leased
    done = 0
    while done < len(blocks) and not blocks.limit.reached() and not loader.off:
        window = blocks.part(done, done + MAX_RESOLVE)
        ask = {"lease": lease, "namespace": namespace_id, "first": window.first, "count": len(window)}
        try:
            reply = session.call(Extents, **ask)
        except RequestRefused:
            break  # the lease is over, which its release will say, or the daemon keeps nothing
        try:
            extents = unpack_extents(reply.extents)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if reply.first != window.first or len(extents) > len(window):
            raise ProtocolError("the daemon named other extents than were asked for")
        named = window.part(0, len(extents))
        own_keys = keys[window.first * KEY_BYTES : (window.first + len(extents)) * KEY_BYTES]
        seeds = block_seeds(own_keys, fingerprint, loader.pool.block_bytes)
        result = loader.load(session.generation, reply.directories, extents, seeds, named)
        done += result.good
        if result.bad:
            session.call(BadExtent, lease=lease, namespace=namespace_id, index=blocks.first + done)
        if result.good < len(window):
            break
    return done
