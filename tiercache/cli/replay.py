"""`tiercache replay`: a trace on caches of other sizes and policies, and how far they are from the best possible."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tiercache.cli.exits import EXIT_OK
from tiercache.cli.machine import as_bytes, check_mfu, find_gpu
from tiercache.cli.report import Section, print_json, print_sections, with_human
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration
from tiercache.plan.model import load_model
from tiercache.plan.sizes import Form
from tiercache.protocol.namespaces import MAX_BLOCK_BYTES
from tiercache.replay.estimate import Costs
from tiercache.replay.formats.bailian import Bailian
from tiercache.replay.formats.mooncake import Mooncake
from tiercache.replay.formats.recorded import Recorded, RecordedReader
from tiercache.replay.formats.trace import Format, Trace, check_block_size
from tiercache.replay.formats.vllm import KvEvents
from tiercache.replay.sweep import AS_RECORDED, Point, Swept, Wanted, sweep

FORMATS: dict[str, Format] = {one.name: one for one in (Recorded(), Bailian(), Mooncake(), KvEvents())}
TELL_EVERY_S = 0.2


class Options(NamedTuple):
    """The command line: sizes as text, None where a flag was not given."""

    traces: list[Path]
    format: str
    dram: str | None
    nvme: str
    gpu_pool: str
    policy: str | None
    write_budget: str
    model: str
    kv_dtype: str
    block_size: int | None
    block_bytes: str | None
    gpu: str
    tflops: float | None
    mfu: float
    bus: str | None
    dram_bandwidth: str
    nvme_bandwidth: str
    optimum: bool
    exact: bool
    skip_bad: bool
    plot: Path | None
    as_json: bool


def run(options: Options) -> int:
    """Replay and print. Raises ConfigError, one line with a remedy."""
    _check(options)
    if options.plot is not None:
        from tiercache.replay.plot import check_plot

        check_plot(options.plot)
    form = Form(load_model(options.model), options.kv_dtype, 1, 1)
    costs = _costs(options, form)
    wanted = Wanted(
        dram=_parts(options.dram),
        nvme=options.nvme,
        gpu_pool=options.gpu_pool,
        policies=_parts(options.policy),
        write_budget_bytes=as_bytes("--write-budget", options.write_budget),
        exact=options.exact,
        optimum=options.optimum,
    )
    progress = Progress()
    swept = []
    for path in options.traces:
        trace = _open(path, options, form.token_bytes)
        progress.begin(path.name)
        try:
            swept.append(sweep(trace, wanted, costs, progress.tell))
        finally:
            progress.clear()
        _warn(trace)
    if options.plot is not None:
        from tiercache.replay.plot import draw

        draw(options.plot, swept)
    if options.as_json:
        print_json(with_human([_tree(one) for one in swept]))
    else:
        _print(swept, options, costs)
    return EXIT_OK


def _check(options: Options) -> None:
    check_block_size(options.block_size)
    if options.format not in ("auto", *FORMATS):
        raise ConfigError(f"--format {options.format}: must be auto, {', '.join(FORMATS)}")
    if options.gpu.isdigit():
        text = f"names a GPU or its memory (80GiB): an engine's own pool is --gpu-pool {options.gpu}"
        raise ConfigError(f"--gpu {options.gpu}: {text}")
    for policy in _parts(options.policy):
        if problem := SETTINGS["policy"].kind.check(policy):
            raise ConfigError(f"--policy {policy}: {problem}")


def _parts(text: str | None) -> tuple[str, ...]:
    """The items between commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _costs(options: Options, form: Form) -> Costs:
    """The costs of computing and loading, on the named GPU and disks."""
    check_mfu(options.mfu)
    gpu = find_gpu(options.gpu, options.tflops, options.bus)
    dram = min(gpu.bus_bytes_per_s, as_bytes("--dram-bandwidth", options.dram_bandwidth, least=1))
    nvme = min(dram, as_bytes("--nvme-bandwidth", options.nvme_bandwidth, least=1))
    return Costs(form.model, gpu.flops * options.mfu, dram, nvme)


def _open(path: Path, options: Options, token_bytes: float) -> Trace:
    given = None if options.block_bytes is None else as_bytes("--block-bytes", options.block_bytes)

    def block_bytes(block_tokens: int) -> int:
        size = round(block_tokens * token_bytes) if given is None else given
        if not 0 < size <= MAX_BLOCK_BYTES:
            text = f"a block of {block_tokens} tokens has {format_bytes(size)}, and the daemon's have at most "
            raise ConfigError(f"{text}{format_bytes(MAX_BLOCK_BYTES)}: say --block-bytes or another --model")
        return size

    formats = list(FORMATS.values()) if options.format == "auto" else [FORMATS[options.format]]
    return Trace(path, formats, block_bytes, options.block_size, options.skip_bad)


class Progress:
    """One line of progress on stderr, if that is a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._name = ""
        self._next_s = 0.0

    def begin(self, name: str) -> None:
        """Begin another trace."""
        self._name = name

    def tell(self, what: str, share: float) -> None:
        """Report what is being done, now and then."""
        if self._on and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_EVERY_S
            print(f"\r{self._name}: {what}: {share:.0%}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line: nothing is being done any more."""
        if self._on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _warn(trace: Trace) -> None:
    """Print warnings on stderr."""
    if trace.bad_lines:
        print(f"tiercache: {trace.bad_lines} lines left out, the first: {trace.first_problem}", file=sys.stderr)
    if trace.late_requests:
        text = "requests came later in the file than their time says, by more than the window that is put in order"
        print(f"tiercache: {trace.path}: {trace.late_requests} {text}: taken as they came", file=sys.stderr)
    if isinstance(trace.reader, RecordedReader) and trace.reader.lost_requests:
        text = "requests were lost while this was recorded: figures are of the others"
        print(f"tiercache: {trace.path}: {trace.reader.lost_requests} {text}", file=sys.stderr)


# --- for people ----------------------------------------------------------------------------------


def _tree(swept: Swept) -> dict[str, Any]:
    trace = swept.trace
    return {
        "trace": str(trace.path),
        "format": trace.format.name,
        "unique_blocks": swept.unique_blocks,
        "bad_lines": trace.bad_lines,
        "late_requests": trace.late_requests,
        "points": [point.as_tree() for point in swept.points],
    }


def _print(swept: list[Swept], options: Options, costs: Costs) -> None:
    print_sections([section for one in swept for section in _sections(one)])
    print(
        f"\nHit rates are shares of prompt tokens. Times are of one request alone: {options.model}, "
        f"{costs.flops_per_s:.3g} FLOP/s, DRAM {costs.dram_bytes_per_s / 1e9:.3g} GB/s, "
        f"NVMe {costs.nvme_bytes_per_s / 1e9:.3g} GB/s."
    )
    if options.plot is not None:
        print(f"The picture is in {options.plot}.")


def _sections(swept: Swept) -> list[Section]:
    first = swept.points[0].played
    tiers = list(first.tiers)
    several = len({point.sizes.policy for point in swept.points}) > 1
    heads = ["DRAM", "blocks", *(["policy"] if several else []), *[f"hit {tier}" for tier in tiers]]
    heads += ["hit all"] if len(tiers) > 1 else []
    best = swept.points[0].best_dram is not None
    # Behind an engine's own pool DRAM has the blocks that the pool lacks; there is no such optimum.
    alone = best and "gpu" not in tiers
    heads += ["best DRAM"] if alone else []
    heads += ["best all"] if best and len(tiers) > 1 else []
    heads += ["FLOPs saved", "TTFT mean", "p50", "p90", *(["NVMe written"] if "nvme" in tiers else [])]
    rows = [_row(point, tiers, alone, several) for point in swept.points]
    table = Section(_title(swept), tuple(heads), rows)
    without = swept.points[0].estimate.without
    facts: list[tuple[str, ...]] = [
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
    return f"policy {' and '.join(policies)}, {' and '.join(forms)}"


def _row(point: Point, tiers: list[str], alone: bool, several: bool) -> tuple[str, ...]:
    played, estimate = point.played, point.estimate
    size = format_bytes(point.sizes.dram_bytes)
    cells = [f"{point.label} ({size})" if point.label != size else size, f"{point.dram_blocks:,}"]
    cells += [point.sizes.policy] if several else []
    cells += [f"{played.rate(tier):.1%}" for tier in tiers]
    cells += [f"{played.rate(*tiers):.1%}"] if len(tiers) > 1 else []
    cells += [f"{point.best_dram or 0:.1%}"] if alone else []
    cells += [f"{point.best_all:.1%}"] if point.best_all is not None and len(tiers) > 1 else []
    share = estimate.saved_flops / estimate.flops if estimate.flops else 0.0
    times = estimate.with_cache
    cells += [f"{share:.1%}", *map(format_duration, (times.mean_s, times.percentile_s(0.5), times.percentile_s(0.9)))]
    return tuple(cells + ([format_bytes(played.tallies.nvme_written_bytes)] if "nvme" in tiers else []))
