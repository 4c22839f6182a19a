"""What `tiercache replay` prints: tables for people, or a tree for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.cli.report import Section, print_sections
from tiercache.ground.units import format_bytes, format_duration

if TYPE_CHECKING:
    from tiercache.replay.estimate import Costs
    from tiercache.replay.sweep import Point, Swept


def tree(swept: Swept) -> dict[str, Any]:
    """One trace, for JSON."""
    trace = swept.trace
    return {
        "trace": str(trace.path),
        "format": trace.format.name,
        "unique_blocks": swept.unique_blocks,
        "bad_lines": trace.bad_lines,
        "late_requests": trace.late_requests,
        "points": [point.as_tree() for point in swept.points],
    }


def print_tables(swept: list[Swept], model_name: str, costs: Costs) -> None:
    """All traces, for people."""
    print_sections([section for one in swept for section in _sections(one)])
    print(
        f"\nHit rates are shares of prompt tokens. Times are of one request alone: {model_name}, "
        f"{costs.flops_per_s:.3g} FLOP/s, DRAM {costs.dram_bytes_per_s / 1e9:.3g} GB/s, "
        f"NVMe {costs.nvme_bytes_per_s / 1e9:.3g} GB/s{_network(swept, costs)}."
    )


def _network(swept: list[Swept], costs: Costs) -> str:
    """The network to the shared store, if there is one."""
    if not any(point.sizes.shared_bytes for one in swept for point in one.points):
        return ""
    round_trip = format_duration(costs.shared_round_trip_s)
    return f", shared store {costs.shared_bytes_per_s / 1e9:.3g} GB/s with round trips of {round_trip}"


def _sections(swept: Swept) -> list[Section]:
    from tiercache.replay.sweep import AS_RECORDED

    first = swept.points[0].played
    tiers = list(first.tiers)
    several = len({point.sizes.policy for point in swept.points}) > 1
    heads = ["DRAM", "blocks", *(["policy"] if several else []), *[f"hit {tier}" for tier in tiers]]
    heads += ["hit all"] if len(tiers) > 1 else []
    heads += ["of others"] if "shared" in tiers else []
    best = swept.points[0].best_dram is not None
    # Behind an engine's own pool DRAM has the blocks that the pool lacks; there is no such optimum.
    alone = best and "gpu" not in tiers
    heads += ["best DRAM"] if alone else []
    heads += ["best all"] if best and len(tiers) > 1 else []
    heads += ["FLOPs saved", "TTFT mean", "p50", "p90", *(["NVMe written"] if "nvme" in tiers else [])]
    rows = [_row(point, tiers, alone, several) for point in swept.points]
    table = Section(_title(swept), tuple(heads), rows)
    without = swept.points[0].estimate.without
    facts = [
        ("requests", f"{first.requests:,}"),
        ("prompt tokens", f"{first.asked_tokens:,}"),
        ("full blocks", f"{first.asked_blocks:,}"),
        ("time span", format_duration(first.last_s - first.first_s)),
        (
            "TTFT without it",
            ", ".join(
                f"{name} {format_duration(value)}"
                for name, value in (
                    ("mean", without.mean_s),
                    ("p50", without.percentile_s(0.5)),
                    ("p90", without.percentile_s(0.9)),
                )
            ),
        ),
    ]
    if swept.unique_blocks is not None:
        facts.insert(3, ("different blocks", f"{swept.unique_blocks:,}"))
    if first.recorded and swept.points[0].label == AS_RECORDED:
        facts.append(("matches as recorded", f"{first.agreed:,} of {first.recorded:,}"))
    return [Section(swept.trace.path.name, ("", ""), facts), table]


def _title(swept: Swept) -> str:
    specs = swept.trace.specs.values()
    forms = sorted({f"blocks of {spec.block_size} tokens, {format_bytes(spec.block_bytes)}" for spec in specs})
    policies = dict.fromkeys(point.sizes.policy for point in swept.points)
    sizes = swept.points[0].sizes
    hosts = f", {sizes.hosts} hosts by {sizes.spread}" if sizes.hosts > 1 else ""
    return f"policy {' and '.join(policies)}, {' and '.join(forms)}{hosts}"


def _row(point: Point, tiers: list[str], alone: bool, several: bool) -> tuple[str, ...]:
    played, estimate = point.played, point.estimate
    size = format_bytes(point.sizes.dram_bytes)
    cells = [f"{point.label} ({size})" if point.label != size else size, f"{point.dram_blocks:,}"]
    cells += [point.sizes.policy] if several else []
    cells += [f"{played.rate(tier):.1%}" for tier in tiers]
    cells += [f"{played.rate(*tiers):.1%}"] if len(tiers) > 1 else []
    cells += [f"{played.others_share:.1%}"] if "shared" in tiers else []
    cells += [f"{point.best_dram or 0:.1%}"] if alone else []
    cells += [f"{point.best_all:.1%}"] if point.best_all is not None and len(tiers) > 1 else []
    share = estimate.saved_flops / estimate.flops if estimate.flops else 0.0
    times = estimate.with_cache
    cells += [f"{share:.1%}", *map(format_duration, (times.mean_s, times.percentile_s(0.5), times.percentile_s(0.9)))]
    return tuple(cells + ([format_bytes(played.tallies.nvme_written_bytes)] if "nvme" in tiers else []))
