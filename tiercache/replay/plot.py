"""Plots hit rates over sizes. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError
from tiercache.ground.extras import install_extra
from tiercache.replay.sweep import Point, Swept

SUFFIXES = (".png", ".svg")
_DRAM, _ALL = "#1f77b4", "#d95f02"
_BELOW = {"nvme": "NVMe", "shared": "shared"}
_MARKERS = "os^Dvx"
"""One marker per policy."""


def check_plot(path: Path) -> None:
    """Raises ConfigError for a picture that could not be written at the end."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the picture's name must end in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: its directory does not exist")
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"--plot needs matplotlib: {install_extra('plot')}") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tiercache"
    from matplotlib import pyplot

    return pyplot


def draw(path: Path, swept: Sequence[Swept]) -> None:
    """Draw one panel per trace: share of tokens over blocks of DRAM. Raises ConfigError if it cannot be written."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(swept), figsize=(6.4 * len(swept), 4.4), squeeze=False)
    for panel, one in zip(panels[0], swept, strict=True):
        _draw_panel(panel, one)
    figure.tight_layout()
    try:
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=144, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _draw_panel(panel: Any, swept: Swept) -> None:
    points = sorted(swept.points, key=lambda point: point.sizes.dram_bytes)
    policies = list(dict.fromkeys(point.sizes.policy for point in swept.points))
    tiers = [name for name in ("gpu", "dram", "nvme", "shared") if any(name in point.played.tiers for point in points)]
    upper = "GPU, DRAM" if "gpu" in tiers else "DRAM"
    lower = " and ".join(_BELOW[name] for name in tiers if name in _BELOW)
    for number, policy in enumerate(policies):
        drawn = [point for point in points if point.sizes.policy == policy]
        sizes = [point.sizes.dram_bytes / (1 << 30) for point in drawn]
        marker, name = _MARKERS[number % len(_MARKERS)], f"{policy}: " if len(policies) > 1 else ""
        _line(panel, sizes, [_rate(point, ("gpu", "dram")) for point in drawn], _DRAM, f"{name}{upper}", f"{marker}-")
        if lower:
            rates = [_rate(point, tuple(tiers)) for point in drawn]
            _line(panel, sizes, rates, _ALL, f"{name}{upper} and {lower}", f"{marker}--")
    if all(point.best_dram is not None for point in points):
        _line(panel, sizes, [100 * (point.best_dram or 0) for point in drawn], _DRAM, "optimum, DRAM alone", ":")
        if lower:
            best = [100 * (point.best_all or 0) for point in drawn]
            _line(panel, sizes, best, _ALL, "optimum, all tiers", ":")
    if len(sizes) > 1:
        panel.set_xscale("log")
        panel.set_xticks(sizes, labels=[f"{size:.3g}" for size in sizes])
        panel.set_xticks([], minor=True)
    panel.set_ylim(0, 100)
    panel.set_xlabel("DRAM (GiB)")
    panel.set_ylabel("hit rate (% of prompt tokens)")
    panel.set_title(f"{swept.trace.path.name}, policy {', '.join(policies)}", fontsize=10)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _rate(point: Point, tiers: tuple[str, ...]) -> float:
    return 100 * point.played.rate(*tiers)


def _line(panel: Any, sizes: list[float], rates: list[float], colour: str, label: str, style: str) -> None:
    panel.plot(sizes, rates, style, color=colour, label=label, markersize=4)
