"""`tiercache doctor`: checks the host, its disks and the daemon, with a remedy for each problem."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.connection import connected, is_barred
from tiercache.cli.declare import Address, ConfigFile, Json, command
from tiercache.cli.doctor.findings import Finding, Host, Needs, State, as_tree
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.cli.readings import Tree, at, quiet_client
from tiercache.cli.report import print_json, printable
from tiercache.config.daemon_config import DaemonConfig, resolve_config, session_socket_path
from tiercache.errors import TierCacheError

if TYPE_CHECKING:
    from tiercache.protocol.namespaces import NamespaceSpec

_COLOURS = {State.OK: "green", State.WARNING: "yellow", State.FAILURE: "bold red", State.NOT_APPLICABLE: "dim"}


@command(
    "doctor",
    """\
  tiercache doctor                    the host, the disks, the daemon, the hit rate
  tiercache doctor --quick --json | jq '.findings[] | select(.state != "ok")'
  tiercache doctor --dir /mnt/nvme0/kv
                                      a disk before it is given to a daemon
  tiercache doctor --shared valkey://kv.example:6379 --model Qwen3-32B --prefill 9000
                                      whether a shared store works, and pays
  tiercache doctor --gds /mnt/nvme0/tiercache
                                      also whether GPUDirect works there, and is faster
""",
    "0 nothing fails (there may be warnings), 1 something fails, 2 a wrong command line or setting",
)
def doctor(
    gds: Annotated[
        Path | None,
        typer.Option(
            "--gds",
            metavar="DIR",
            help="Test GPUDirect on a directory, with 64 MiB that are removed again (2 minutes).",
        ),
    ] = None,
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", metavar="DIR", help="A directory for --nvme (repeatable; default: those in use)."),
    ] = None,
    shared: Annotated[
        str,
        typer.Option(
            "--shared",
            metavar="URL",
            help="A store for --shared (default: that of the settings). Every user of the host reads a password here.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose KV the shared store is judged by, as for `plan`.")
    ] = "Llama-3.1-8B",
    prefill: Annotated[
        float | None,
        typer.Option("--prefill", metavar="N", help="Tokens per second that an engine computes (default: on an H100)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure disks or stores, or test the GPU.")] = False,
    path: ConfigFile = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Examine the host, its disks and the daemon, and name a remedy for each problem.

    Works with and without a daemon. Takes 1 s, up to 15 s for each nvme directory (64 MiB are written there and
    removed), 2 s for a shared store (a block of 2 MiB is written there and removed), up to 20 s for a GPU, and 2
    minutes with --gds.
    """
    from tiercache.cli.doctor import daemon, disk, gpu, hits, host, store

    rival = store.prefill_of(model, prefill)
    config = resolve_config(path).config
    run_dir = Path(address) if address else config.run_dir
    tree, specs, problem = _ask(run_dir)
    needs = _needs(config, tree)
    found = host.examine(Host(), needs)
    found += disk.examine(needs, tuple(directories or needs.nvme_dirs), measure=not quick)
    found += store.examine(config, tree, shared, rival, measure=not quick)
    found += [] if quick else gpu.examine()
    found += daemon.examine(run_dir, tree, problem) + hits.examine(tree, specs)
    probe = None if gds is None else gpu.probe_gds(gds)
    found += [] if probe is None else [gpu.finding(probe)]
    failed = any(one.state is State.FAILURE for one in found)
    if as_json:
        probed = {} if probe is None else {"gds": gpu.as_tree(probe)}
        print_json({"ok": not failed, "findings": as_tree(found), **probed})
    else:
        _print(found)
        if probe is not None:
            gpu.print_probe(probe)
    return EXIT_UNWELL if failed else EXIT_OK


def _ask(run_dir: Path) -> tuple[Tree, dict[int, NamespaceSpec], str]:
    """A running daemon's statistics and specs, or why there are none."""
    from tiercache.protocol.messages import MAX_NAMESPACES_PER_REQUEST, Specs
    from tiercache.protocol.namespaces import NamespaceSpec

    if is_barred(run_dir) or not session_socket_path(run_dir).exists():
        return {}, {}, ""  # `daemon.examine` says which
    try:
        with quiet_client(), connected(str(run_dir)) as client:
            tree = client.stats()
            numbers = [int(one["id"]) for one in tree.get("namespaces", [])][-MAX_NAMESPACES_PER_REQUEST:]
            sent = client.session().call(Specs, namespaces=numbers).specs if numbers else {}
            return tree, {number: NamespaceSpec.received(fields) for number, fields in sent.items()}, ""
    except TierCacheError as error:
        return {}, {}, str(error)


def _needs(config: DaemonConfig, tree: Tree) -> Needs:
    from tiercache.daemon.descriptors import needed
    from tiercache.daemon.processes import beside_arena

    directories = config.nvme_paths
    if tree:
        directories = tuple(Path(one["path"]) for one in tree.get("tiers", {}).get("nvme", {}).get("directories", []))
    nvme_bytes = int(at(tree, "tiers.nvme.capacity_bytes")) or config.nvme_capacity_bytes
    segments = nvme_bytes // config.nvme_segment_bytes if directories else 0
    arena_bytes = int(at(tree, "arena.bytes")) or config.arena_bytes
    regions = -(-arena_bytes // config.region_bytes)
    beside = beside_arena(config, len(directories))
    fds = needed(
        config.max_sessions,
        regions=regions,
        directories=len(directories),
        segments=segments,
        has_workers=beside.workers > 0,
        remote=bool(config.listen),
        event_sockets=bool(config.kv_events) + bool(config.kv_events_replay),
    )
    pid = int(at(tree, "daemon.pid"))
    return Needs(arena_bytes, config.lock_memory, fds, directories, nvme_bytes, pid, beside)


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
        lines = [(f"{one.state.value:<14}", f"  {one.name:<{width}}  {printable(one.figure)}")]
        lines += [(" " * 14, f"  {'':<{width}}  -> {one.remedy}")] if one.remedy else []
        for state, rest in lines:
            if console is None:
                print((state + rest).rstrip())
            else:
                console.print(Text.assemble((state, _COLOURS[one.state]), rest))
