"""`tiercache bench codec`: what codecs save on given blocks, what they cost, and on which disks they pay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tiercache.cli.declare import DECLARED, LOCAL_STATUS, PLAIN, Json, ending
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.report import Section, print_json, print_sections
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tiercache.cli.bench.codecs import CodecFigures
    from tiercache.cli.bench.disk import DiskFigures

bench = DECLARED["bench"] = typer.Typer(
    epilog=ending(
        """\
  tiercache bench codec               would a codec pay on these disks?
""",
        LOCAL_STATUS,
    ),
    **PLAIN,
)


@bench.callback()
def _bench() -> None:
    """Measure on this machine."""


class _Measured(NamedTuple):
    """All figures. `missing`: codecs that cannot be used here, and why."""

    source: str
    dtype: str
    blocks: int
    block_bytes: int
    figures: list[CodecFigures]
    missing: dict[str, str]
    disk: DiskFigures | None


@bench.command(
    "codec",
    epilog=ending(
        """\
  tiercache bench codec --dir /mnt/nvme0
                                      made-up bfloat16 blocks, against the disk of that directory
  tiercache bench codec --file kv.bin --block-bytes 2MiB --dtype float16
                                      your own blocks
  tiercache bench codec --json
""",
        LOCAL_STATUS,
    ),
)
def bench_codec(
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="FILE", help="Blocks, one after the other (repeatable; default: made-up ones)."),
    ] = None,
    block_bytes: Annotated[str, typer.Option("--block-bytes", metavar="SIZE", help="Length of one block.")] = "1MiB",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="Element type, as torch names it.")
    ] = "bfloat16",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Measure its disk too: 256 MiB are written, read and removed."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what codecs save on KV blocks, what they cost, and on which disks that pays."""
    from tiercache.cli.bench.codecs import blocks_of, made_up_blocks, measure
    from tiercache.cli.bench.disk import measure_disk
    from tiercache.daemon.tiers.forms.codecs import element_bytes
    from tiercache.protocol.namespaces import MAX_BLOCK_BYTES

    try:
        size = parse_bytes(block_bytes)
    except ValueError as error:
        raise ConfigError(f"--block-bytes = {block_bytes}: {error}") from None
    if not 1 <= size <= MAX_BLOCK_BYTES:
        raise ConfigError(f"--block-bytes = {block_bytes}: must be 1 to {MAX_BLOCK_BYTES}")
    element = element_bytes(dtype)
    if files:
        blocks, source = blocks_of(files, size), ", ".join(map(str, files))
    else:
        if dtype != "bfloat16":
            raise ConfigError(f"--dtype = {dtype}: synthetic blocks are in bfloat16: give --file, or leave it out")
        blocks, source = made_up_blocks(size), "synthetic: normal values, a scale for each channel, as bfloat16"
    figures, missing = measure(element, blocks)
    disk = None if directory is None else measure_disk(directory)
    found = _Measured(source, dtype, len(blocks), len(blocks[0]), figures, missing, disk)
    if as_json:
        print_json(_tree(found))
    else:
        print_sections(_sections(found))
    return EXIT_OK


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _cores(disk_bytes_per_s: float, pays_below: float) -> str:
    """Cores that a codec needs to be faster than this disk without it."""
    return f"{disk_bytes_per_s / pays_below:.1f}" if pays_below > 0 else "never"


def _sections(found: _Measured) -> list[Section]:
    disk = found.disk
    rows = [
        ("blocks", f"{found.blocks} of {format_bytes(found.block_bytes)}, {found.dtype}"),
        ("from", found.source),
    ]
    if disk is not None:
        how = "direct I/O" if disk.direct else "through the page cache: this file system refuses direct I/O"
        text = f"{disk.directory}: write {_gb(disk.write_bytes_per_s)}, read {_gb(disk.read_bytes_per_s)}"
        rows.append(("disk", f"{text} ({format_bytes(disk.bytes)}, {disk.threads} threads, {how})"))
    rows += list(found.missing.items())
    columns = ["codec", "ratio", "blocks encoded", "encode/core", "decode/core", "write pays below", "read pays below"]
    if disk is not None:
        columns += ["cores to write here", "cores to read here"]
    table = []
    for one in found.figures:
        cells = [
            one.codec,
            f"{one.ratio:.3f}",
            f"{one.encoded_share:.0%}",
            _gb(one.encode_bytes_per_s),
            _gb(one.decode_bytes_per_s),
            _gb(one.write_pays_below),
            _gb(one.read_pays_below),
        ]
        if disk is not None:
            cells.append(_cores(disk.write_bytes_per_s, one.write_pays_below))
            cells.append(_cores(disk.read_bytes_per_s, one.read_pays_below))
        table.append(tuple(cells))
    notes = [
        ("ratio", "bytes moved without a codec over those with it, in pages of 4096; slots stay as large as blocks"),
        ("pays below", "bandwidth of a disk below which a block takes less time with the codec, one core at work"),
    ]
    if disk is not None:
        notes.append(("cores", "how many have to encode or decode at once for the codec to be faster on this disk"))
    sections = [Section("blocks", ("", ""), rows)]
    if table:
        sections.append(Section("codecs", tuple(columns), table))
    return [*sections, Section("how to read it", ("", ""), notes)]


def _tree(found: _Measured) -> dict[str, Any]:
    return {
        "command": " ".join(["tiercache", *sys.argv[1:]]),
        "cpu": _cpu(),
        "source": found.source,
        "blocks": found.blocks,
        "block_bytes": found.block_bytes,
        "dtype": found.dtype,
        "codecs": [
            {
                **one._asdict(),
                "write_pays_below_bytes_per_s": one.write_pays_below,
                "read_pays_below_bytes_per_s": one.read_pays_below,
            }
            for one in found.figures
        ],
        "missing": found.missing,
        "disk": None if found.disk is None else found.disk._asdict(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
