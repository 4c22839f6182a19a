"""`tiercache doctor`: checks the host, its disks and the daemon, with a remedy for each problem."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiercache.cli import doctor_cuda, doctor_daemon, doctor_disk, doctor_hits, doctor_host
from tiercache.cli.control import connected
from tiercache.cli.exits import EXIT_OK, EXIT_UNWELL
from tiercache.cli.findings import Finding, Host, Needs, State, as_tree, failure, ok, warning
from tiercache.cli.live import Tree, at, quiet_client
from tiercache.cli.report import Section, print_json, print_sections
from tiercache.config.daemon_config import DaemonConfig, resolve_config, session_socket_path
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds
from tiercache.errors import TierCacheError
from tiercache.ground.units import format_bytes
from tiercache.protocol.namespaces import NamespaceSpec

_WAYS = {
    Mode.GDS: "disk to GPU memory (gds)",
    Mode.COMPAT: "through cuFile's own bounce buffer (cufile-compat)",
    Mode.POSIX: "through host memory only (posix)",
}
_COLOURS = {State.OK: "green", State.WARNING: "yellow", State.FAILURE: "bold red", State.NOT_APPLICABLE: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line as given."""

    gds: Path | None
    directories: tuple[Path, ...]
    quick: bool
    config: Path | None
    address: str | None
    as_json: bool


def run(options: Options) -> int:
    """Examine and print. Exit status 1: something does not work. Raises ConfigError for wrong settings."""
    config, _ = resolve_config(options.config)
    run_dir = Path(options.address) if options.address else config.run_dir
    tree, specs, problem = _ask(run_dir)
    needs = _needs(config, tree)
    found = doctor_host.examine(Host(), needs)
    found += doctor_disk.examine(needs, options.directories or needs.nvme_dirs, measure=not options.quick)
    found += [] if options.quick else doctor_cuda.examine()
    found += doctor_daemon.examine(run_dir, tree, problem) + doctor_hits.examine(tree, specs)
    probe = None if options.gds is None else probe_gds(options.gds)
    found += [] if probe is None else [_gds(probe)]
    failed = any(one.state is State.FAILURE for one in found)
    if options.as_json:
        print_json({"ok": not failed, "findings": as_tree(found), **({} if probe is None else {"gds": _tree(probe)})})
    else:
        _print(found)
        if probe is not None:
            print_sections([Section(f"GPUDirect on {probe.directory}", ("", ""), _rows(probe))])
    return EXIT_UNWELL if failed else EXIT_OK


def _ask(run_dir: Path) -> tuple[Tree, dict[int, NamespaceSpec], str]:
    """A running daemon's statistics and specs, or why there are none."""
    from tiercache.protocol.messages import MAX_NAMESPACES_PER_REQUEST, SpecList, Specs

    if not session_socket_path(run_dir).exists():
        return {}, {}, ""
    try:
        with quiet_client(), connected(str(run_dir)) as client:
            tree = client.stats()
            numbers = [int(one["id"]) for one in tree.get("namespaces", [])][-MAX_NAMESPACES_PER_REQUEST:]
            sent = client.session().call(Specs, SpecList, namespaces=numbers).specs if numbers else {}
            return tree, {number: NamespaceSpec.received(fields) for number, fields in sent.items()}, ""
    except TierCacheError as error:
        return {}, {}, str(error)


def _needs(config: DaemonConfig, tree: Tree) -> Needs:
    from tiercache.daemon.descriptors import needed

    directories = config.nvme_paths
    if tree:
        directories = tuple(Path(one["path"]) for one in tree.get("tiers", {}).get("nvme", {}).get("directories", []))
    nvme_bytes = int(at(tree, "tiers.nvme.capacity_bytes")) or config.nvme_capacity_bytes
    segments = nvme_bytes // config.nvme_segment_bytes if directories else 0
    arena_bytes = int(at(tree, "arena.bytes")) or config.arena_bytes
    regions = -(-arena_bytes // config.region_bytes)
    fds = needed(
        config.max_sessions,
        regions=regions,
        directories=len(directories),
        segments=segments,
        remote=bool(config.listen),
        event_sockets=bool(config.kv_events) + bool(config.kv_events_replay),
    )
    pid = int(at(tree, "daemon.pid"))
    return Needs(arena_bytes, config.lock_memory, fds, directories, nvme_bytes, pid)


def _print(found: list[Finding]) -> None:
    """An aligned line for each finding; the remedy on its own line, easy to find for people and in pipes."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True) if sys.stdout.isatty() else None
    width = max(len(one.name) for one in found)
    topic = ""
    for one in found:
        if one.topic != topic:
            print(f"{'' if not topic else chr(10)}# {one.topic}")
            topic = one.topic
        figure = "".join(char if char.isprintable() else "?" for char in one.figure)
        lines = [(f"{one.state.value:<14}", f"  {one.name:<{width}}  {figure}")]
        lines += [(" " * 14, f"  {'':<{width}}  -> {one.remedy}")] if one.remedy else []
        for state, rest in lines:
            if console is None:
                print((state + rest).rstrip())
            else:
                console.print(Text.assemble((state, _COLOURS[one.state]), rest))


# --- GPUDirect ---------------------------------------------------------------------------------------


def _gds(probe: GdsProbe) -> Finding:
    name = f"GPUDirect on {probe.directory}"
    figure = _WAYS[probe.mode] + (f": {probe.reason}" if probe.reason else "")
    if probe.host_bytes_per_s <= 0:
        return failure("gpu", name, figure, "name a directory that exists and can be written to")
    if probe.mode is Mode.POSIX:
        return warning("gpu", name, figure, "nothing is lost but speed: blocks go by way of the daemon's memory")
    return ok("gpu", name, figure)


def _tree(probe: GdsProbe) -> dict[str, Any]:
    uses = {"use_direct": probe.use_direct, "use_direct_store": probe.use_direct_store}
    return {**asdict(probe), "mode": probe.mode.value, **uses}


def _rows(probe: GdsProbe) -> list[tuple[str, ...]]:
    rows = [("blocks go", _WAYS[probe.mode])]
    if probe.reason:
        rows.append(("because", probe.reason))
    rates = {
        "read to the GPU": probe.direct_bytes_per_s,
        "read by way of page-locked memory": probe.bounce_bytes_per_s,
        "read to host memory": probe.host_bytes_per_s,
        "written from the GPU": probe.direct_write_bytes_per_s,
        "written by way of page-locked memory": probe.bounce_write_bytes_per_s,
    }
    rows += [(name, f"{format_bytes(rate)}/s" if rate else "not measured") for name, rate in rates.items()]
    if probe.write_reason:
        rows.append(("writing fails", probe.write_reason))
    rows.append(('gds="auto" uses it', "yes" if probe.use_direct else "no"))
    rows.append(("gds_store=True uses it", "yes" if probe.use_direct_store else "no"))
    return list(rows)
