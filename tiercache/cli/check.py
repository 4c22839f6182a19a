"""`tiercache check`: finds faults in nvme directories that no daemon uses, or in a running daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.cli.control import connected
from tiercache.cli.exits import EXIT_OK, EXIT_UNWELL, NotAnswering
from tiercache.cli.report import print_json
from tiercache.config.daemon_config import default_address, resolve_config, session_socket_path
from tiercache.errors import ConfigError, DaemonUnavailable, ProtocolError, RequestRefused
from tiercache.ground.units import format_bytes, parse_bytes
from tiercache.protocol.messages import Check, CheckReply, ErrorCode

if TYPE_CHECKING:
    from tiercache.daemon.tiers.nvme.check.directory_check import Progress, Report

DEFAULT_SAMPLE = 1000
ALL = -1
ANSWER_S = 30.0
"""Deadline for checking a daemon's index; reading blocks comes on top."""
BLOCK_S = 50e-6
"""Time per block in the index of a busy daemon."""
FULL_ANSWER_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line as given."""

    nvme: tuple[str, ...]
    repair: bool
    full: bool
    sample: int | None
    rate: str
    force: bool
    config: Path | None
    as_json: bool
    address: str | None

    def blocks(self) -> int:
        """Number of blocks to read; ALL for all blocks."""
        if self.full:
            return ALL
        return DEFAULT_SAMPLE if self.sample is None else self.sample


def check(options: Options) -> int:
    """Check what the options name and print the findings. Returns the exit status.

    Raises ConfigError if there is nothing to check, or the check is not possible.
    """
    if options.full and options.sample is not None:
        raise ConfigError("--full and --sample exclude each other: give one of them")
    try:
        rate = parse_bytes(options.rate)
    except ValueError as error:
        raise ConfigError(f"--rate = {options.rate}: {error}") from None
    if options.nvme and (options.address is not None or options.force):
        raise ConfigError("--nvme is for directories that no daemon uses: leave out --address and --force")
    directories = [Path(one.strip()).absolute() for text in options.nvme for one in text.split(",") if one.strip()]
    if not directories:
        where = options.address or default_address()
        if options.address is not None or os.path.exists(session_socket_path(where)):
            if options.repair:
                raise ConfigError(f"the daemon at {where} mends itself: stop it to use --repair on its directories")
            try:
                return _check_daemon(options, where, rate)
            except DaemonUnavailable as error:
                if options.address is not None or isinstance(error, NotAnswering):
                    raise
        directories = list(resolve_config(options.config).config.nvme_paths)
    if not directories:
        raise ConfigError(
            "no daemon runs and no nvme directory is configured: name one with --nvme, or a daemon with --address"
        )
    return _check_directories(options, directories, rate)


# --- without a daemon --------------------------------------------------------------------------------


def _check_directories(options: Options, directories: list[Path], rate: int) -> int:
    from tiercache.daemon.tiers.nvme.check.directory_check import check_directory

    reports = []
    for directory in directories:
        with _progress(options.as_json, str(directory)) as progress:
            reports.append(check_directory(directory, options.blocks(), rate, options.repair, progress))
    if options.as_json:
        print_json({"ok": not any(report.findings for report in reports), "directories": list(map(_tree, reports))})
    else:
        for report in reports:
            _print_report(report, options.repair)
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
    verdict = "clean" if not count else "1 finding" if count == 1 else f"{count} findings"
    print(f"{report.path}: {verdict}: {report.rows:,} rows, {read}")
    for finding in report.findings:
        print(f"  {finding}")
    for note in report.notes:
        print(f"  (normal: {note})")
    if count and repair:
        print(f"  repaired: {report.deleted_rows:,} rows deleted")
    elif count:
        print("  a daemon takes these for misses; --repair deletes them")


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


def _check_daemon(options: Options, where: str, rate: int) -> int:
    with connected(where) as client:
        sample = options.blocks()
        timeout_s = _answer_s(client.stats(), sample, rate)
        try:
            reply = client.call(Check, timeout_s=timeout_s, sample=sample, bytes_per_s=rate, force=options.force)
        except RequestRefused as refusal:
            if refusal.code != ErrorCode.LIMIT.value:
                raise
            raise ConfigError(f"the daemon at {where} was not checked: {refusal.text} (--force)") from None
    if not isinstance(reply, CheckReply):
        raise ProtocolError(f"a check was answered with {type(reply).__name__}")
    if options.as_json:
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
        count = len(reply.findings)
        verdict = "clean" if not count else "1 finding" if count == 1 else f"{count} findings"
        print(f"daemon at {where}: {verdict}: {reply.blocks:,} blocks, {reply.scanned_blocks:,} read from disks")
        for finding in reply.findings:
            print(f"  {finding}")
    return EXIT_UNWELL if reply.findings else EXIT_OK


def _answer_s(stats: dict[str, Any], sample: int, rate: int) -> float:
    """How long to wait for an answer: twice the time for the index and for reading at the given rate."""
    tiers = stats.get("tiers", {})
    on_disk, books_s = tiers.get("nvme", {}), sum(int(one["blocks"]) for one in tiers.values()) * BLOCK_S
    total_bytes, blocks = int(on_disk.get("bytes", 0)), int(on_disk.get("blocks", 0))
    if sample != ALL and blocks:
        total_bytes = min(total_bytes, total_bytes // blocks * sample)
    return min(FULL_ANSWER_S, ANSWER_S + books_s + 2 * total_bytes / min(rate or 50 << 20, 50 << 20))
