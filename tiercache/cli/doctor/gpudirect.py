"""GPUDirect on a directory, for `tiercache doctor --gds`: which way blocks go, and how fast each way is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tiercache.cli.doctor.findings import Finding, failure, ok, warning
from tiercache.cli.report import Section, print_sections
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds
from tiercache.ground.units import format_bytes

__all__ = ["as_tree", "finding", "print_probe", "probe_gds"]

_WAYS = {
    Mode.GDS: "disk to GPU memory (gds)",
    Mode.COMPAT: "through cuFile's own bounce buffer (cufile-compat)",
    Mode.POSIX: "through host memory only (posix)",
}


def finding(probe: GdsProbe) -> Finding:
    """The line about GPUDirect."""
    name = f"GPUDirect on {probe.directory}"
    figure = _WAYS[probe.mode] + (f": {probe.reason}" if probe.reason else "")
    if probe.host_bytes_per_s <= 0:
        return failure("gpu", name, figure, "name a directory that exists and can be written to")
    if probe.mode is Mode.POSIX:
        return warning("gpu", name, figure, "only speed is lost: blocks go through the daemon's memory")
    return ok("gpu", name, figure)


def as_tree(probe: GdsProbe) -> dict[str, Any]:
    """All figures, for JSON."""
    uses = {"use_direct": probe.use_direct, "use_direct_store": probe.use_direct_store}
    return {**asdict(probe), "mode": probe.mode.value, **uses}


def print_probe(probe: GdsProbe) -> None:
    """Print all figures as a table."""
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
    print_sections([Section(f"GPUDirect on {probe.directory}", ("", ""), rows)])
