"""The thread that makes the arena, region by region, while the daemon already answers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tiercache.config.setting_kinds import toml_bytes
from tiercache.copies.arena import Beside, Region, capacity, create_region
from tiercache.errors import ArenaError, ConfigError
from tiercache.ground.units import format_bytes, round_up

from .niceness import go_behind

log = logging.getLogger("tiercache.daemon")

RETRY_S = 2.0
NICENESS = 10
_REGION_GRANULE_BYTES = 2 << 20


def check_fits(arena_bytes: int, beside: Beside) -> None:
    """Raise ConfigError for an arena that this host can never provide: the kernel would kill engines for it.

    Memory in use now does not count: clients of a killed daemon may still map it.
    """
    here = capacity()
    largest = here.largest_arena_bytes(beside)
    if arena_bytes <= largest:
        return
    kept = f", {format_bytes(here.kept_bytes)} of it for engines and the system" if here.is_host else ""
    parts = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in beside.parts(arena_bytes).items())
    remedies = [f"write arena = {toml_bytes(largest)} or less"] if largest else []
    if not here.is_host:
        enough = round_up(arena_bytes + beside.total_bytes(arena_bytes), 1 << 20)
        remedies.append(f"raise that limit to {enough >> 20}MiB")
    text = f"{here.where} has {format_bytes(here.limit_bytes)}{kept}, and beside the arena need some of it {parts}"
    remedy = ", or ".join(remedies) or "this host has no room for one"
    raise ConfigError(f"arena = {toml_bytes(arena_bytes)}: {text}: {remedy}")


class RegionMaker(threading.Thread):
    """Allocates, maps, populates and locks one region after another; hands each over when ready.

    Memory that is not available yet (a killed daemon's clients may still map its regions) is requested again every two
    seconds, and `shortage` says so meanwhile. `hand_over(region, fd)` and `give_up(text)` are called on this thread:
    pass the loop's `call_soon_threadsafe`.
    """

    def __init__(
        self,
        arena_bytes: int,
        region_bytes: int,
        lock_memory: str,
        hand_over: Callable[[Region, int], None],
        give_up: Callable[[str], None],
    ) -> None:
        super().__init__(name="regions", daemon=True)
        self._sizes = region_sizes(arena_bytes, region_bytes)
        self._lock_memory = lock_memory
        self._hand_over = hand_over
        self._give_up = give_up
        self._stopped = threading.Event()
        self.shortage = ""

    def run(self) -> None:
        try:
            self._make_all()
        except Exception as error:
            log.exception("the thread that makes the arena ended")
            self._give_up(f"the arena cannot be made: {type(error).__name__}: {error}")

    def _make_all(self) -> None:
        go_behind(NICENESS)  # it wants a core for seconds, the loop wants one at once
        for region_id, size_bytes in enumerate(self._sizes):
            made = self._make(region_id, size_bytes)
            if made is None:
                return
            region, fd = made
            populated = region.populate()
            if not populated:
                log.warning("this kernel cannot populate memory ahead (before 5.14): first stores are slower")
            if self._lock_memory != "off" and not region.lock() and self._lock_memory == "require":
                self._give_up(
                    "memory could not be locked: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=infinity) "
                    "or set lock_memory = 'auto'"
                )
                return
            if self._stopped.is_set():
                return
            self._hand_over(region, fd)

    def _make(self, region_id: int, size_bytes: int) -> tuple[Region, int] | None:
        while not self._stopped.is_set():
            try:
                fd = create_region(size_bytes, f"tiercache-{region_id}")
                try:
                    return Region(region_id, fd, size_bytes), fd
                except ArenaError:
                    os.close(fd)  # else every attempt would keep a region's memory
                    raise
            except (ArenaError, OSError) as error:
                if not self.shortage:
                    log.warning("%s; trying again every %.0f s", error, RETRY_S)
                self.shortage = str(error)
            self._stopped.wait(RETRY_S)
        return None

    def stop(self) -> None:
        """Ask the thread to end; it does after the current region."""
        self._stopped.set()


def region_sizes(arena_bytes: int, region_bytes: int) -> list[int]:
    """Sizes of the regions that make up an arena; the last may be smaller."""
    whole, rest = divmod(arena_bytes, region_bytes)
    return [region_bytes] * whole + ([round_up(rest, _REGION_GRANULE_BYTES)] if rest else [])
