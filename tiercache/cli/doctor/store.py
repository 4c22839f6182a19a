"""Checks the store that hosts share: whether it takes and gives a block, how fast, and whether a hit from it pays."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from tiercache.cli.doctor.disk import within
from tiercache.cli.doctor.findings import Finding, failure, ok, skipped, warning
from tiercache.cli.readings import Tree
from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import StoreUrl
from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.shared.naming import EPOCH_BYTES, FORMAT, MARK_BYTES, BlockIdentity
from tiercache.daemon.tiers.shared.settings import SharedSettings, shared_settings
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put, StoreError, StoreProblem
from tiercache.daemon.tiers.shared.value import HEADER_BYTES
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration
from tiercache.protocol.messages import KEY_BYTES

TOPIC = "shared store"
BLOCK_BYTES = 2 << 20
CALL_S = 5.0
ANSWER_S = 30.0
"""After this time the store's own client counts as hung."""
PART_S = 1.0
"""Longest measurement of a fetch over all connections."""
ROUND_TRIPS = 10
LEFT_S = 60.0
"""Lifetime of what is left behind if deleting fails."""
HIT_TOKENS = 8192
MODEL = "Llama-3.1-8B"
_GPU, _MFU = "H100", 0.5
_FINGERPRINT = "00" * 16
_REMEDIES = {
    StoreProblem.UNREACHABLE: "start it, correct the URL, or open the way to it (routes, firewall, network policy)",
    StoreProblem.TIMEOUT: "see whether it is overloaded or stopped, and whether the network loses packets",
    StoreProblem.DENIED: "correct the credentials, and let them read, write and delete what begins with tc1:",
    StoreProblem.FULL: "set maxmemory-policy volatile-ttl, or give it more room",
    StoreProblem.BUSY: "wait until it has loaded or moved its data, then run this again",
    StoreProblem.READ_ONLY: "name the primary: this one takes no writes",
    StoreProblem.PROTOCOL: "see whether the URL names the kind of server that answers there, and its version",
}


class Prefill(NamedTuple):
    """What a hit competes with: seconds to compute `HIT_TOKENS` tokens, and the bytes of their KV."""

    model: str
    compute_s: float
    kv_bytes: int


class StoreSpeed(NamedTuple):
    """What was measured, with proving (and unsealing) what comes: seconds, and bytes per second."""

    round_trip_s: float
    put: float
    get: float
    connections: int


def prefill_of(model: str, tokens_per_s: float | None) -> Prefill:
    """The figures of `plan` for a model that it knows, or the rate that was given. Raises ConfigError."""
    from tiercache.plan.known import GPUS
    from tiercache.plan.model import load_model
    from tiercache.plan.sizes import Form

    known = load_model(model)
    form = Form(known, "auto", 16, 1)
    compute_s = known.prefill_flops(HIT_TOKENS) / (GPUS[_GPU].flops * _MFU)
    name = f"{known.name} on an {_GPU}"
    if tokens_per_s is not None:
        if not tokens_per_s > 0:
            raise ConfigError(f"--prefill {tokens_per_s:g}: is a number of tokens per second, more than 0")
        name, compute_s = f"{known.name} at {tokens_per_s:,.0f} tokens/s", HIT_TOKENS / tokens_per_s
    return Prefill(name, compute_s, round(HIT_TOKENS * form.token_bytes) + form.state_gpu_bytes)


def examine(config: DaemonConfig, tree: Tree, url: str, prefill: Prefill, measure: bool) -> list[Finding]:
    """Findings about the store of the settings, or of `url`; `tree`: the statistics of a running daemon, if any."""
    used = str(tree.get("tiers", {}).get("shared", {}).get("store", ""))
    if url:
        config = dataclasses.replace(config, shared=StoreUrl(url), shared_plain=config.shared_key is None)
    if not config.shared:
        if used:
            figure = f"the daemon uses {used}, whose URL these settings do not have"
            return [skipped(TOPIC, "store", f"{figure}: give the daemon's (--config, TIERCACHE_SHARED)")]
        return [skipped(TOPIC, "store", "none is configured: --shared")]
    try:
        settings = shared_settings(config)
    except ConfigError as error:
        return [failure(TOPIC, "store", str(error), "correct this setting")]
    found = within(ANSWER_S, partial(_collect, settings, config.shared_deployment, prefill, measure))
    if found is None:
        remedy = "see whether the store or its file system hangs; the daemon goes on without it"
        return [failure(TOPIC, settings.store.address, f"does not answer within {ANSWER_S:.0f} s", remedy)]
    if used and used != settings.store.address:
        remedy = "restart the daemon, or give this command the daemon's settings"
        found.append(warning(TOPIC, "daemon", f"uses another store: {used}", remedy))
    return found


def _collect(settings: SharedSettings, deployment: str, prefill: Prefill, measure: bool) -> list[Finding]:
    address = settings.store.address
    trial = _Trial(settings, deployment)
    try:
        return list(_findings(trial, prefill, measure))
    except StoreError as error:
        return [failure(TOPIC, address, f"{trial.step}: {error.text}", _REMEDIES[error.problem])]
    except _Wrong as error:
        remedy = "see what else writes to it, and its memory and network; the daemon takes such answers for misses"
        return [failure(TOPIC, address, f"{trial.step}: {error}", remedy)]
    finally:
        trial.close()


def _findings(trial: _Trial, prefill: Prefill, measure: bool) -> Iterator[Finding]:
    settings = trial.settings
    speed = trial.run(measure)
    form = "encrypted" if settings.form.sealed else "in plain"
    yield ok(TOPIC, settings.store.address, f"takes, gives and deletes a block of {format_bytes(BLOCK_BYTES)}, {form}")
    figure = f"{format_duration(speed.round_trip_s)} for a look-up"
    if 3 * speed.round_trip_s > settings.lookup_timeout_s:  # a look-up asks about that often
        remedy = f"raise --shared-lookup-timeout, now {format_duration(settings.lookup_timeout_s)}: look-ups come late"
        yield warning(TOPIC, "round trip", figure, remedy)
    else:
        yield ok(TOPIC, "round trip", figure)
    if not measure:
        yield skipped(TOPIC, "speed", "not measured: --quick")
        return
    each = f"{speed.connections} connection{'s' if speed.connections > 1 else ''}"
    figure = f"{format_bytes(speed.put)}/s sent on one connection, {format_bytes(speed.get)}/s fetched on {each}"
    yield ok(TOPIC, "speed", figure)
    yield verdict(prefill, speed.get)


def verdict(prefill: Prefill, bytes_per_s: float) -> Finding:
    """True if fetching a prompt is faster than computing it."""
    fetch_s = prefill.kv_bytes / bytes_per_s
    figure = (
        f"{HIT_TOKENS:,} tokens of {prefill.model}: {format_duration(fetch_s)} to fetch "
        f"{format_bytes(prefill.kv_bytes)}, {format_duration(prefill.compute_s)} to compute"
    )
    if fetch_s < prefill.compute_s:
        return ok(TOPIC, "a hit pays", figure)
    remedy = "more connections in the URL, a faster network or a nearer store; engines decline hits that do not pay"
    return warning(TOPIC, "no hit pays", figure, remedy)


class _Wrong(Exception):
    """The store answered what it should not."""


class _Trial:
    """One block under a name of its own. Blocks; each call has a deadline."""

    def __init__(self, settings: SharedSettings, deployment: str) -> None:
        self.settings = settings
        self.step = "connecting"
        self._line = settings.store.connect()
        own = os.urandom(16)
        self._whose = BlockIdentity(own[:KEY_BYTES], _FINGERPRINT, own[:EPOCH_BYTES], own[:MARK_BYTES], BLOCK_BYTES)
        self._name = b"%b:%b:doctor:%b" % (FORMAT, deployment.encode(), own.hex().encode())
        self._block = os.urandom(BLOCK_BYTES)
        self._there = False

    def run(self, measure: bool) -> StoreSpeed:
        """Try everything. Raises StoreError or _Wrong."""
        self._is_there("asking for a block that is not there", False)
        self.step = "sending a block"
        put_s = min(_seconds(self._put) for _ in range(3 if measure else 1))
        round_trip_s = min(
            _seconds(partial(self._is_there, "asking for a block that is there", True)) for _ in range(ROUND_TRIPS)
        )
        self.step = "fetching a block"
        if bytes(self._get(self._line)) != self._block:
            raise _Wrong("other bytes came back than were sent")
        get, connections = self._fetch_rate() if measure else (0.0, 1)
        self.step = "deleting a block"
        self._line.delete([self._name], _deadline_s())
        self._there = False
        self._is_there("asking for a block that was deleted", False)
        return StoreSpeed(round_trip_s, BLOCK_BYTES / put_s, get, connections)

    def _is_there(self, step: str, wanted: bool) -> None:
        self.step = step
        if self._line.exists([self._name], (), _deadline_s()).there != [wanted]:
            raise _Wrong("the answer is wrong")

    def _put(self) -> None:
        form = self.settings.form
        scratch = memoryview(bytearray(form.body_bytes(BLOCK_BYTES)))
        header, body = form.pack(self._whose, memoryview(self._block), scratch)
        value = Put(self._name, [header, body], LEFT_S)
        self._there = True
        self._line.put([value], (), _deadline_s())
        if value.fate is not Fate.DONE:
            raise _Wrong(f"the block was {value.fate.value}")

    def _get(self, line: Connection, room: memoryview | None = None) -> memoryview:
        """The block, proved: `room` holds it, or what it came in."""
        form = self.settings.form
        room = memoryview(bytearray(form.body_bytes(BLOCK_BYTES))) if room is None else room
        head = memoryview(bytearray(HEADER_BYTES))
        value = Get(self._name, head, room)
        line.get([value], (), _deadline_s())
        if value.fate is not Fate.DONE:
            raise _Wrong(f"the block was {value.fate.value}")
        block = room[:BLOCK_BYTES] if not form.sealed else memoryview(bytearray(BLOCK_BYTES))
        outcome = form.unpack(self._whose, bytes(head), room[: value.body_bytes], block)
        if outcome is not FetchOutcome.OK:
            raise _Wrong("other bytes came back than were sent")
        return block

    def _fetch_rate(self) -> tuple[float, int]:
        """Bytes per second over all connections that the daemon would use, and how many those are."""
        count = max(1, self.settings.store.connections)
        fetched, problems = [0] * count, list[Exception]()
        until_s = time.perf_counter() + PART_S

        def fetch(number: int) -> None:
            line = self.settings.store.connect()
            room = memoryview(bytearray(self.settings.form.body_bytes(BLOCK_BYTES)))
            try:
                while not problems:
                    self._get(line, room)
                    fetched[number] += BLOCK_BYTES
                    if time.perf_counter() >= until_s:  # not before: on a busy host no thread may begin in time
                        break
            except (StoreError, _Wrong) as error:
                problems.append(error)
            finally:
                line.close()

        threads = [threading.Thread(target=fetch, args=(number,), daemon=True) for number in range(count)]
        seconds = _seconds(lambda: _run(threads))
        if problems:
            raise problems[0]
        return sum(fetched) / seconds, count

    def close(self) -> None:
        """Leave nothing behind, as far as the store lets us."""
        try:
            if self._there:
                self._line.delete([self._name], _deadline_s())
        except StoreError:
            return  # it goes by itself: see LEFT_S
        finally:
            self._line.close()


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _deadline_s() -> float:
    return time.monotonic() + CALL_S


def _seconds(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - started_s)
