"""Checks the daemon: whether it runs here and is well, who may reach it, and whether all use the same protocol."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tiercache import __version__
from tiercache.cli.connection import NOT_OURS, is_barred
from tiercache.cli.doctor.findings import Finding, collect, failure, ok, skipped, warning
from tiercache.cli.readings import Tree, at
from tiercache.ground.units import format_duration

TOPIC = "daemon"
MANY_STARTS_PER_HOUR = 2.0
"""More worker processes than that of one nvme directory, besides its first two, are too many."""


def examine(run_dir: Path, tree: Tree, problem: str) -> list[Finding]:
    """Findings about the daemon at a run directory; `tree`: its statistics, empty if it does not answer."""
    checks = (partial(_running, run_dir, tree, problem), partial(_permissions, run_dir))
    if not tree:
        return collect(TOPIC, checks)
    return collect(
        TOPIC,
        (
            *checks,
            partial(_health, tree),
            partial(_versions, tree),
            partial(_clients, tree),
            partial(_chains, tree),
            partial(_loop, tree),
            partial(_log, tree),
            partial(_disks, tree),
            partial(_workers, tree),
        ),
    )


def _running(run_dir: Path, tree: Tree, problem: str) -> Iterator[Finding]:
    if is_barred(run_dir):
        yield failure(TOPIC, "running", f"{run_dir} may not be entered by this user", NOT_OURS)
    elif tree:
        daemon = tree["daemon"]
        figure = f"pid {daemon['pid']} at {run_dir}, up for {format_duration(daemon['uptime_s'])}"
        yield ok(TOPIC, "running", figure)
    elif (run_dir / "session.sock").exists():
        remedy = "see the daemon's log; the next start removes a socket that a killed daemon left"
        yield failure(TOPIC, "running", f"there is a socket at {run_dir}, but no daemon answers: {problem}", remedy)
    else:
        yield skipped(TOPIC, "running", f"no daemon at {run_dir}: tiercache daemon")


def _permissions(run_dir: Path) -> Iterator[Finding]:
    wanted = {run_dir: 0o750, run_dir / "session.sock": 0o660, run_dir / "control.sock": 0o660}
    looked = []
    for path, most in wanted.items():
        try:
            found = path.stat()
        except (FileNotFoundError, PermissionError):
            continue
        mode = found.st_mode & 0o777  # sticky and set-group-ID bits let nobody in
        looked.append(f"{path.name} {mode:04o}")
        if mode & ~most:
            do = f"chmod {most & ~0o070:04o} {path}"
            if mode & 0o022 and found.st_mode & stat.S_ISVTX:  # such as /tmp
                do = f"name a folder in it as run_dir, such as {path}/tiercache"
            remedy = f"{do}: every user who can open it can read and write all KV"
            yield failure(TOPIC, f"mode of {path.name}", f"{mode:04o}", remedy)
        elif found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            remedy = "run engines as the daemon's user, or share it with a group (--group)"
            yield warning(TOPIC, f"owner of {path.name}", f"uid {found.st_uid}, you are {os.geteuid()}", remedy)
    if looked:
        yield ok(TOPIC, "modes", ", ".join(looked))
    else:
        yield skipped(TOPIC, "modes", f"nothing can be seen of {run_dir}")


def _health(tree: Tree) -> Iterator[Finding]:
    reasons = tree["health"].get("reasons", [])
    for reason in reasons:
        yield warning(TOPIC, "health", str(reason), "see the daemon's log; reads go on, and failed work is tried again")
    if not reasons:
        yield ok(TOPIC, "health", str(tree["health"].get("state")))


def _versions(tree: Tree) -> Iterator[Finding]:
    from tiercache.protocol.messages import OLDEST_PROTOCOL, PROTOCOL

    own, running = __version__, str(tree["daemon"].get("version"))
    spoken = {int(one.get("protocol", PROTOCOL)) for one in tree.get("sessions", [])}
    figure = f"protocol {', '.join(map(str, sorted(spoken)))}; daemon {running}, this command {own}"
    if any(not OLDEST_PROTOCOL <= one <= PROTOCOL for one in spoken):
        yield warning(TOPIC, "versions", figure, "use one release on both sides")
    elif running != own:
        yield warning(TOPIC, "versions", figure, "restart the daemon to run what is installed here")
    else:
        yield ok(TOPIC, "versions", figure)


def _clients(tree: Tree) -> Iterator[Finding]:
    clients = [one for one in tree.get("sessions", []) if one.get("name") not in ("tiercache-cli", "http")]
    if not clients:
        remedy = "name this run directory to the engine, and see the engine's log"
        yield warning(TOPIC, "clients", "no engine is connected", remedy)
        return
    unlocked = [one["name"] for one in clients if one.get("mapped") and one.get("registration") == "none"]
    if unlocked:
        names = ", ".join(sorted(set(unlocked))[:4])
        remedy = "raise ulimit -l of these processes: memory that is not locked may be slower to copy from"
        yield warning(TOPIC, "clients", f"{len(clients)} connected; neither cuda nor mlock: {names}", remedy)
    else:
        yield ok(TOPIC, "clients", f"{len(clients)} connected")


def _chains(tree: Tree) -> Iterator[Finding]:
    """Clients connected now whose keys form no chains."""
    broken = [one for one in tree.get("sessions", []) if one.get("broken_chains")]
    if broken:
        names = ", ".join(f"{one['name']} ({one['broken_chains']})" for one in broken[:4])
        remedy = "report it to the maker of the client: its keys are repeated, left out or mixed, so it gets misses"
        yield warning(TOPIC, "chains", f"lists of keys that are not chains: {names}", remedy)


def _loop(tree: Tree) -> Iterator[Finding]:
    stalls, slow = int(at(tree, "counters.loop_stalls")), int(at(tree, "counters.requests_slow"))
    failed, expired = int(at(tree, "counters.requests_failed")), int(at(tree, "counters.requests_expired"))
    figure = f"{stalls} stalls, {slow} slow requests, {expired} read too late, {failed} failed"
    if failed:
        yield failure(TOPIC, "requests", figure, "a failed request is a defect: report it with the daemon's log")
    elif slow or expired or stalls > 1:  # one at the start is usual
        remedy = "the log names slow requests (--slow-request); give the daemon a core of its own"
        yield warning(TOPIC, "requests", figure, remedy)
    else:
        yield ok(TOPIC, "requests", figure)


def _log(tree: Tree) -> Iterator[Finding]:
    daemon: dict[str, Any] = tree["daemon"]
    lost = int(daemon.get("log_lost_lines", 0))
    if lost:
        why = daemon.get("log_problem") or "it goes on again"
        yield warning(TOPIC, "log", f"{lost} lines were lost: {why}", "read the daemon's stderr, or give it room")
    else:
        yield ok(TOPIC, "log", "no line was lost")


def _disks(tree: Tree) -> Iterator[Finding]:
    """What reads and writes the blocks of each open directory."""
    for one in tree.get("tiers", {}).get("nvme", {}).get("directories", []):
        carrier, reason = str(one.get("io", "")), str(one.get("io_reason", ""))
        if not carrier:
            continue
        figure = f"by {carrier}: {reason}" if reason else f"by {carrier}"
        if "fs.aio-max-nr" in reason:
            yield warning(
                TOPIC, f"I/O of {one['path']}", figure, "sysctl fs.aio-max-nr=1048576, and restart the daemon"
            )
        else:
            yield ok(TOPIC, f"I/O of {one['path']}", figure)


def _workers(tree: Tree) -> Iterator[Finding]:
    hours = float(tree["daemon"].get("uptime_s", 0)) / 3600
    for one in tree.get("tiers", {}).get("nvme", {}).get("directories", []):
        pid, starts = int(one.get("worker_pid", 0)), int(one.get("worker_starts", 0))
        if not starts:
            continue  # the daemon itself does the I/O
        name, ended = f"worker process of {one['path']}", starts - 1
        figure = f"pid {pid}" if pid else "none at the moment"
        figure += f", {ended} ended before it" if ended else ""
        if not pid or (ended > 1 and ended > MANY_STARTS_PER_HOUR * hours):
            remedy = "the daemon's log says how each ended; status -9: dmesg, perhaps the memory limit is too low"
            yield warning(TOPIC, name, figure, remedy)
        else:
            yield ok(TOPIC, name, figure)
