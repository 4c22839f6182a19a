"""`tiercache doctor`: what this machine can do. Today that is one question: GPUDirect on a directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tiercache.cli.main import EXIT_OK, EXIT_UNWELL
from tiercache.cli.report import Section, print_json, print_sections
from tiercache.gds_probe import GdsProbe, Mode, probe_gds
from tiercache.units import format_bytes

_WAYS = {
    Mode.GDS: "disk to GPU memory (gds)",
    Mode.COMPAT: "through cuFile's own bounce buffer (cufile-compat)",
    Mode.POSIX: "through host memory only (posix)",
}


def gds(directory: Path, *, as_json: bool) -> int:
    """Probe GPUDirect on a directory and print what was found; 1 if the directory cannot be used at all."""
    probe = probe_gds(directory)
    usable = probe.host_bytes_per_s > 0
    if as_json:
        uses = {"use_direct": probe.use_direct, "use_direct_store": probe.use_direct_store}
        print_json({"gds": {**asdict(probe), "mode": probe.mode.value, **uses}})
    else:
        print_sections([Section(f"GPUDirect on {probe.directory}", ("", ""), _rows(probe))])
    return EXIT_OK if usable else EXIT_UNWELL


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
