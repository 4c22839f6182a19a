"""Checks the host: kernel, libraries, memory, descriptors, clock. No check takes longer than a fifth of a second."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tiercache import __version__
from tiercache.cli.doctor.findings import Finding, Host, Needs, collect, failure, limit_of, ok, skipped, warning
from tiercache.errors import ConfigError
from tiercache.ground.extras import DISTRIBUTION, install_packages
from tiercache.ground.processors import usable_cores
from tiercache.ground.units import format_bytes, format_duration

TOPIC = "host"
REQUIRED = ("numpy", "pyzmq", "msgspec", "xxhash", "lz4", "typer", "rich")
OPTIONAL = ("torch", "transformers", "triton", "vllm", "starlette", "uvicorn", "zstandard", "kvikio-cu13")
CLOCK_READS, CLOCK_TRIES = 2_000, 10
CLOCK_S = 0.1
SLOW_CLOCK_NS = 500
STALL_S = 0.1
"""As in `tiercache.daemon.ground.clock`: a longer gap does not count as time of leases."""
_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")


def examine(host: Host, needs: Needs) -> list[Finding]:
    """All findings about the host."""
    checks = (
        _kernel,
        _libraries,
        partial(_memory, host, needs),
        partial(_memlock, host, needs),
        _calls,
        partial(_huge_pages, host),
        partial(_descriptors, host, needs),
        partial(_processors, host, needs),
        partial(_clock, host),
    )
    return collect(TOPIC, checks)


def _kernel() -> Iterator[Finding]:
    release = platform.release()
    numbers = [int(part) for part in re.findall(r"\d+", release)[:2]]
    if numbers < [5, 6]:
        yield failure(TOPIC, "kernel", release, "use Linux 5.6 or later: the daemon needs pidfds")
    elif numbers < [5, 14]:
        yield warning(
            TOPIC,
            "kernel",
            release,
            "use Linux 5.14 or later, which populates memory in advance: first stores are slow here",
        )
    else:
        yield ok(TOPIC, "kernel", release)


def _libraries() -> Iterator[Finding]:
    found = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    shown = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    figure = f"tiercache {__version__}, python {platform.python_version()}, {shown}"
    missing = [name for name in REQUIRED if not found[name]]
    if missing:
        yield failure(TOPIC, "libraries", f"missing: {', '.join(missing)}", install_packages(*missing))
    else:
        yield ok(TOPIC, "libraries", figure)
    if other := _version("tiercache"):  # another project's, or an early release of ours under that name
        figure = f"tiercache {other} is installed beside {DISTRIBUTION}, and has the same files"
        yield warning(TOPIC, "distribution", figure, f"uninstall both, and install {DISTRIBUTION} again")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _memory(host: Host, needs: Needs) -> Iterator[Finding]:
    wanted = needs.arena_bytes + needs.beside.total_bytes(needs.arena_bytes)
    limit = memory_limit(host, needs)
    if limit is None:
        yield skipped(TOPIC, "cgroup memory", "no limit")
    elif limit < wanted:
        remedy = f"give the container {format_bytes(wanted)}, or the daemon a smaller --arena"
        yield failure(TOPIC, "cgroup memory", f"{format_bytes(limit)} for {format_bytes(wanted)} of the daemon", remedy)
    else:
        yield ok(TOPIC, "cgroup memory", f"{format_bytes(limit)}, the daemon needs {format_bytes(wanted)}")
    lines = dict(line.split(":", 1) for line in host.read(host.proc / "meminfo").splitlines() if ":" in line)
    available = int(lines.get("MemAvailable", "0").split()[0]) * 1024
    if needs.pid:
        yield ok(TOPIC, "memory", f"{format_bytes(available)} available besides the arena")
    elif available < wanted:
        figure = f"{format_bytes(available)} available, the arena of the settings needs {format_bytes(wanted)}"
        yield failure(TOPIC, "memory", figure, "choose a smaller --arena (`tiercache config` shows the settings)")
    else:
        yield ok(TOPIC, "memory", f"{format_bytes(available)} available, the daemon needs {format_bytes(wanted)}")


def memory_limit(host: Host, needs: Needs) -> int | None:
    """The tightest cgroup memory limit above the daemon (or this process), in bytes; None without one."""
    found: list[int] = []
    for base, folder, unified in _cgroups(host, needs, "memory"):
        name = "memory.max" if unified else "memory.limit_in_bytes"
        while base in (folder, *folder.parents):
            text = host.read(folder / name)
            # An unset limit of version 1 is a huge number.
            if text.isdecimal() and int(text) < 1 << 60:
                found.append(int(text))
            folder = folder.parent
    return min(found, default=None)


def _cgroups(host: Host, needs: Needs, controller: str) -> Iterator[tuple[Path, Path, bool]]:
    """Root, folder and version (2: True) of the cgroups with a controller for the daemon."""
    for line in host.read(host.process(needs) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = host.sys / "fs" / "cgroup"
        if controllers == "":
            yield root, root / path.lstrip("/"), True
        elif controller in controllers.split(","):
            yield root / controller, root / controller / path.lstrip("/"), False


def _memlock(host: Host, needs: Needs) -> Iterator[Finding]:
    soft, _ = limit_of(host.read(host.process(needs) / "limits"), "Max locked memory")
    if needs.lock_memory == "off":
        yield skipped(TOPIC, "memlock", "lock_memory is off")
    elif soft is None or _may_lock(host, needs):
        yield ok(TOPIC, "memlock", "no limit")
    elif soft >= needs.arena_bytes:
        yield ok(TOPIC, "memlock", f"{format_bytes(soft)}, the arena has {format_bytes(needs.arena_bytes)}")
    else:
        figure = f"{format_bytes(soft)}, the arena has {format_bytes(needs.arena_bytes)}"
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK: else the arena may be swapped"
        yield (failure if needs.lock_memory == "require" else warning)(TOPIC, "memlock", figure, remedy)


def _may_lock(host: Host, needs: Needs) -> bool:
    """True if the capability CAP_IPC_LOCK (bit 14) lifts the limit."""
    lines = dict(line.split(":", 1) for line in host.read(host.process(needs) / "status").splitlines() if ":" in line)
    return bool(int(lines.get("CapEff", "0").strip() or "0", 16) >> 14 & 1)


def _calls() -> Iterator[Finding]:
    """System calls and shared memory, as the daemon tries them before it serves."""
    from tiercache.daemon.ground.system_calls import check_calls

    try:
        check_calls()
    except ConfigError as error:
        figure, _, remedy = str(error).partition(": ")
        yield failure(TOPIC, "system calls", figure, remedy)
        return
    yield ok(TOPIC, "system calls", "the kernel grants those without which nothing works")
    stat = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    room = "" if stat is None else format_bytes(stat.f_bavail * stat.f_frsize)
    beside = f"; /dev/shm, which only engines use, has {room}" if room else ""
    yield ok(TOPIC, "shared memory", f"memfds can be made{beside}")


def _huge_pages(host: Host) -> Iterator[Finding]:
    text = host.read(host.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        yield skipped(TOPIC, "huge pages", "this kernel has none for shared memory")
    elif chosen[1] in ("always", "within_size", "force"):
        yield ok(TOPIC, "huge pages", f"shared memory: {chosen[1]}")
    else:
        # Not a warning: the gain has not been measured on every machine.
        yield ok(TOPIC, "huge pages", f"shared memory: {chosen[1]}, so the arena has pages of 4 KiB")


def _descriptors(host: Host, needs: Needs) -> Iterator[Finding]:
    soft, hard = limit_of(host.read(host.process(needs) / "limits"), "Max open files")
    # A daemon raises its soft limit to the hard one by itself.
    limit = soft if needs.pid else hard
    if limit is not None and limit < needs.fds:
        remedy = f"ulimit -n {needs.fds}, or LimitNOFILE={needs.fds}; or lower --max-sessions"
        yield warning(TOPIC, "descriptors", f"{limit:,}, the daemon's limits need {needs.fds:,}", remedy)
    else:
        yield ok(TOPIC, "descriptors", f"{'no limit' if limit is None else f'{limit:,}'}, at most {needs.fds:,} needed")


def _processors(host: Host, needs: Needs) -> Iterator[Finding]:
    cores = float(usable_cores())
    figure = f"{cores:.0f} may be used"
    for base, folder, unified in _cgroups(host, needs, "cpu"):
        while base in (folder, *folder.parents):
            quota = _quota(host, folder, unified)
            if quota is not None and quota < cores:
                cores, figure = quota, f"a cgroup gives {quota:.1f}"
            folder = folder.parent
    if cores < 1:
        remedy = "give the container a whole core: with less, the kernel stops the daemon for the rest of each period"
        yield warning(TOPIC, "processors", figure, remedy)
    else:
        yield ok(TOPIC, "processors", figure)


def _quota(host: Host, folder: Path, unified: bool) -> float | None:
    """The most cores that a cgroup allows."""
    if unified:
        quota, _, period = host.read(folder / "cpu.max").partition(" ")
    else:
        quota, period = host.read(folder / "cpu.cfs_quota_us"), host.read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _clock(host: Host) -> Iterator[Finding]:
    source = host.read(host.sys / "devices/system/clocksource/clocksource0/current_clocksource")
    cost_ns = min(_clock_cost_ns() for _ in range(CLOCK_TRIES))  # the least disturbed one
    figure = f"{source or 'unknown'}, {cost_ns:.0f} ns to read"
    if (source and source not in _GOOD_CLOCKS) or cost_ns > SLOW_CLOCK_NS:
        remedy = "each request reads it several times: boot with clocksource=tsc, if the machine has a stable one"
        yield warning(TOPIC, "clock", figure, remedy)
    else:
        yield ok(TOPIC, "clock", figure)
    longest_s, jump_s = _watch_clock()
    figure = f"longest gap in {format_duration(CLOCK_S)}: {format_duration(longest_s)}"
    if jump_s > STALL_S:
        remedy = "find what sets it (ntpd -g, a paused VM): it affects times in logs, but no leases"
        yield warning(TOPIC, "time", f"the wall clock jumped by {format_duration(jump_s)}", remedy)
    elif longest_s > STALL_S:
        remedy = "the machine is overloaded, or a VM that pauses now and then; the daemon extends leases by such gaps"
        yield warning(TOPIC, "time", figure, remedy)
    else:
        yield ok(TOPIC, "time", figure)


def _clock_cost_ns() -> float:
    started_ns = time.perf_counter_ns()
    for _ in range(CLOCK_READS):
        time.monotonic_ns()
    return (time.perf_counter_ns() - started_ns) / CLOCK_READS


def _watch_clock() -> tuple[float, float]:
    """The longest time between two readings of the clock, and how far the wall clock drifted from it meanwhile."""
    started_s, wall_s = time.monotonic(), time.time()
    last_s, longest_s = started_s, 0.0
    while last_s - started_s < CLOCK_S:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s, abs((time.time() - wall_s) - (last_s - started_s))
