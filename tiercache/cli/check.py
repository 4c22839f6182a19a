"""`tiercache check`: finds faults in nvme directories that no daemon uses, or in a running daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Address, ConfigFile, Json, command
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL, NotAnswering
from tiercache.cli.report import print_json
from tiercache.config.daemon_config import default_address, resolve_config, session_socket_path
from tiercache.errors import ConfigError, DaemonUnavailable, ProtocolError, RequestRefused
from tiercache.ground.units import format_bytes, parse_bytes
from tiercache.protocol.messages import Check, CheckReply, ErrorCode

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.check.directory_check import Progress
    from tiercache.daemon.tiers.nvme.check.findings import Report

DEFAULT_SAMPLE = 1000
ALL = -1
ANSWER_S = 30.0
"""Deadline for checking a daemon's index; reading blocks comes on top."""
BLOCK_S = 50e-6
"""Time per block in the index of a busy daemon."""
FULL_ANSWER_S = 7 * 86_400.0


@command(
    "check",
    """\
  tiercache check                     the running daemon, or the configured directories
  tiercache check --nvme /mnt/nvme0/kv --full --rate 1GiB
                                      a directory that no daemon uses, every block
  tiercache check --nvme /mnt/nvme0/kv --repair
                                      also delete what is wrong there
  tiercache check --address /run/tiercache --sample 0
                                      the index of a running daemon only
""",
    f"0 no fault, 1 a fault was found (repaired or not) or no daemon runs, 2 the check is not possible, {SILENT}",
)
def check(
    nvme: Annotated[
        list[str] | None,
        typer.Option("--nvme", metavar="DIR", help="Directory that no daemon uses (may be repeated)."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete wrong rows and the blocks after them (only where no daemon runs).")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every block, not a sample.")] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", min=0, help="Blocks to read, at random (default: 1000).")
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Limit for reading blocks, bytes per second; 0: none.")
    ] = "200MiB",
    path: ConfigFile = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Look for faults in nvme directories, or in a running daemon."""
    scan = _scan_of(full, sample, rate)
    if nvme and address is not None:
        raise ConfigError("--nvme is for directories that no daemon uses: leave out --address")
    directories = [Path(one.strip()).absolute() for text in nvme or () for one in text.split(",") if one.strip()]
    if not directories:
        where = address or default_address()
        if address is not None or os.path.exists(session_socket_path(where)):
            if repair:
                raise ConfigError(
                    f"the daemon at {where} repairs its directories itself: stop it to use --repair on them"
                )
            try:
                return _check_daemon(where, scan, as_json)
            except DaemonUnavailable as error:
                if address is not None or isinstance(error, NotAnswering):
                    raise
        directories = list(resolve_config(path).config.nvme_paths)
    if not directories:
        raise ConfigError(
            "no daemon runs and no nvme directory is configured: name one with --nvme, or a daemon with --address"
        )
    return _check_directories(directories, scan, repair, as_json)


class _Scan(NamedTuple):
    """How many blocks to read (ALL for all), and at how many bytes per second at most."""

    blocks: int
    bytes_per_s: int


def _scan_of(full: bool, sample: int | None, rate: str) -> _Scan:
    if full and sample is not None:
        raise ConfigError("--full and --sample exclude each other: give one of them")
    try:
        bytes_per_s = parse_bytes(rate)
    except ValueError as error:
        raise ConfigError(f"--rate = {rate}: {error}") from None
    return _Scan(ALL if full else DEFAULT_SAMPLE if sample is None else sample, bytes_per_s)


# --- without a daemon --------------------------------------------------------------------------------


def _check_directories(directories: list[Path], scan: _Scan, repair: bool, as_json: bool) -> int:
    from tiercache.daemon.tiers.nvme.check.directory_check import check_directory

    reports = []
    for directory in directories:
        with _progress(as_json, str(directory)) as progress:
            reports.append(check_directory(directory, *scan, repair, progress))
    if as_json:
        print_json({"ok": not any(report.findings for report in reports), "directories": list(map(_tree, reports))})
    else:
        for report in reports:
            _print_report(report, repair)
    return EXIT_UNWELL if any(report.findings for report in reports) else EXIT_OK


def _tree(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "findings": report.findings,
        "notes": report.notes,
        "rows": report.rows,
        "scanned_blocks": report.scanned_blocks,
        "scanned_bytes": report.scanned_bytes,
        "deleted_rows": report.deleted_rows,
    }


def _print_report(report: Report, repair: bool) -> None:
    read = f"{report.scanned_blocks:,} blocks read ({format_bytes(report.scanned_bytes)})"
    count = len(report.findings)
    print(f"{report.path}: {_verdict(count)}: {report.rows:,} rows, {read}")
    for finding in report.findings:
        print(f"  {finding}")
    for note in report.notes:
        print(f"  (normal: {note})")
    if count and repair:
        print(f"  repaired: {report.deleted_rows:,} rows deleted")
    elif count:
        print("  a daemon treats these blocks as misses; --repair deletes them")


@contextmanager
def _progress(as_json: bool, name: str) -> Iterator[Progress]:
    """Shows progress on a terminal; on stderr, so that stdout has the findings only."""
    if as_json or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total or None)

        yield show


# --- a daemon ----------------------------------------------------------------------------------------


def _check_daemon(where: str, scan: _Scan, as_json: bool) -> int:
    sample, rate = scan
    with connected(where) as client:
        timeout_s = _answer_s(client.stats(), sample, rate)
        try:
            reply = client.call(Check, timeout_s=timeout_s, sample=sample, bytes_per_s=rate)
        except RequestRefused as refusal:
            if refusal.code != ErrorCode.LIMIT.value:
                raise
            raise ConfigError(f"the daemon at {where} was not checked: {refusal.text}") from None
    if not isinstance(reply, CheckReply):
        raise ProtocolError(f"a check was answered with {type(reply).__name__}")
    if as_json:
        print_json(
            {
                "ok": not reply.findings,
                "address": where,
                "findings": reply.findings,
                "blocks": reply.blocks,
                "scanned_blocks": reply.scanned_blocks,
            }
        )
    else:
        verdict = _verdict(len(reply.findings))
        print(f"daemon at {where}: {verdict}: {reply.blocks:,} blocks, {reply.scanned_blocks:,} read from disks")
        for finding in reply.findings:
            print(f"  {finding}")
    return EXIT_UNWELL if reply.findings else EXIT_OK


def _verdict(findings: int) -> str:
    return "clean" if not findings else "1 finding" if findings == 1 else f"{findings} findings"


def _answer_s(stats: dict[str, Any], sample: int, rate: int) -> float:
    """How long to wait for an answer: twice the time for the index and for reading at the given rate."""
    tiers = stats.get("tiers", {})
    on_disk, books_s = tiers.get("nvme", {}), sum(int(one.get("blocks", 0)) for one in tiers.values()) * BLOCK_S
    total_bytes, blocks = int(on_disk.get("bytes", 0)), int(on_disk.get("blocks", 0))
    if sample != ALL and blocks:
        total_bytes = min(total_bytes, total_bytes // blocks * sample)
    return min(FULL_ANSWER_S, ANSWER_S + books_s + 2 * total_bytes / min(rate or 50 << 20, 50 << 20))
