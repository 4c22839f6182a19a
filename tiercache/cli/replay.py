"""`tiercache replay`: a trace on caches of other sizes and policies, and how far they are from the best possible."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.declare import Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.hardware import (
    Bus,
    DramBandwidth,
    KvDtype,
    Mfu,
    NvmeBandwidth,
    SharedBandwidth,
    SharedRoundTrip,
    Tflops,
    as_bytes,
    as_rate,
    as_seconds,
    check_mfu,
    find_gpu,
)
from tiercache.cli.report import Section, print_json, print_sections, with_human
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration

if TYPE_CHECKING:
    from tiercache.plan.known import Gpu
    from tiercache.plan.model import Model
    from tiercache.replay.estimate import Costs
    from tiercache.replay.formats.trace import Format, Trace
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


TELL_EVERY_S = 0.2


@command(
    "replay",
    """\
  tiercache replay conversation_trace.jsonl --dram 5% --nvme 5x
  tiercache replay trace.jsonl.gz --dram 1%,2%,5%,10%,20% --nvme 5x --plot sizes.svg
                                      a sweep, as a table and a picture
  tiercache replay trace.jsonl.gz --dram 2%,5% --policy lru,hazard
                                      policies side by side
  tiercache replay trace.jsonl.gz --dram 2% --nvme 5x --shared 20x --hosts 4 --spread prefix
                                      four hosts and a store that they share
  tiercache replay run.jsonl.gz       what `tiercache daemon --record` wrote, at its own sizes
  tiercache replay run.jsonl.gz --dram 64GiB,128GiB --nvme 2TiB --json
  tiercache replay qwen_traceB_blksz_16.jsonl --dram 200000 --model Qwen3-32B --gpu-pool 50000
  tiercache replay kv_events.jsonl --dram 5%
                                      batches of KV events, one a line
""",
    "0 done, 2 a wrong command line or a trace that cannot be read",
)
def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="JSON lines, gzipped or not; each is played separately.")
    ],
    format_name: Annotated[
        str,
        typer.Option("--format", metavar="auto|mooncake|bailian|vllm|recorded", help="Format of the traces."),
    ] = "auto",
    dram: Annotated[
        str | None,
        typer.Option(
            "--dram",
            metavar="SIZE[,..]",
            help="Blocks (20000), bytes (64GiB) or a share of the trace's distinct blocks (5%), or several of them "
            "for a sweep (default: that of the recorded daemon).",
        ),
    ] = None,
    nvme: Annotated[
        str, typer.Option("--nvme", metavar="SIZE", help="Like --dram, or 5x for five times --dram; 0: none.")
    ] = "0",
    shared: Annotated[
        str, typer.Option("--shared", metavar="SIZE", help="Store that the hosts share, like --nvme; 0: none.")
    ] = "0",
    hosts: Annotated[
        int, typer.Option("--hosts", metavar="N", help="Hosts, each with as much DRAM, NVMe and GPU pool.")
    ] = 1,
    spread: Annotated[
        str,
        typer.Option(
            "--spread",
            metavar="round-robin|prefix",
            help="Which host gets a request: each in turn, or the one that was given most of its beginning before.",
        ),
    ] = "round-robin",
    gpu_pool: Annotated[
        str, typer.Option("--gpu-pool", metavar="SIZE", help="An engine's own KV pool in front, like --dram; 0: none.")
    ] = "0",
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME[,..]",
            help="Like the daemon's setting, or several to compare (default: the recorded one, or the daemon's).",
        ),
    ] = None,
    write_budget: Annotated[
        str, typer.Option("--write-budget", metavar="SIZE", help="Like the daemon's nvme_write_budget; 0: no limit.")
    ] = "0",
    model_name: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Model that the requests are for, as in `tiercache plan`.")
    ] = "Llama-3.1-8B",
    kv_dtype: KvDtype = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size", metavar="N", help="Tokens in a block (default: guessed from the lengths, or 512)."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option("--block-bytes", metavar="SIZE", help="Bytes of a block (default: the model's).")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME|SIZE", help="GPU that computes the prompts: H100, A100, L4, ...")
    ] = "H100",
    tflops: Tflops = None,
    mfu: Mfu = 0.5,
    bus: Bus = None,
    dram_bandwidth: DramBandwidth = "150GB",
    nvme_bandwidth: NvmeBandwidth = "6GB",
    shared_bandwidth: SharedBandwidth = "10Gbit",
    shared_round_trip: SharedRoundTrip = "0.5ms",
    optimum: Annotated[
        bool,
        typer.Option(
            "--optimum/--no-optimum",
            help="Compare with the offline optimum. That takes a pass of its own, and memory: 16 bytes for each block "
            "asked for, and about 200 for each distinct one.",
        ),
    ] = True,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip invalid lines, and count them.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates over sizes: .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Play a trace on caches of other sizes: hit rates by tier, time saved, and the best possible result."""
    from tiercache.plan.model import load_model
    from tiercache.plan.sizes import Form
    from tiercache.replay.formats.trace import Trace, check_block_size
    from tiercache.replay.sweep import Wanted, sweep

    check_block_size(block_size)
    formats = _formats(format_name)
    _check_gpu(gpu)
    policies = _policies(policy)
    if plot is not None:
        from tiercache.replay.plot import check_plot

        check_plot(plot)
    model = load_model(model_name)
    if model.state_gpu_bytes(1):
        raise ConfigError(f"{model.name}: has recurrent layers, whose states replay does not count: see tiercache plan")
    check_mfu(mfu)
    costs = replace(
        _costs(model, find_gpu(gpu, tflops, bus), mfu, dram_bandwidth, nvme_bandwidth),
        shared_bytes_per_s=as_rate("--shared-bandwidth", shared_bandwidth),
        shared_round_trip_s=as_seconds("--shared-round-trip", shared_round_trip),
    )
    _check_hosts(hosts, spread)
    wanted = Wanted(
        dram=_parts(dram),
        nvme=nvme,
        gpu_pool=gpu_pool,
        policies=policies,
        write_budget_bytes=as_bytes("--write-budget", write_budget),
        optimum=optimum,
        shared=shared,
        hosts=hosts,
        spread=spread,
    )
    bytes_of = _block_bytes(block_bytes, Form(model, kv_dtype, 1, 1).token_bytes)
    progress = Progress()
    swept = []
    for path in traces:
        trace = Trace(path, formats, bytes_of, block_size, skip_bad)
        progress.begin(path.name)
        try:
            swept.append(sweep(trace, wanted, costs, progress.tell))
        finally:
            progress.clear()
        _warn(trace)
    if plot is not None:
        from tiercache.replay.plot import draw

        draw(plot, swept)
    if as_json:
        print_json(with_human([tree(one) for one in swept]))
    else:
        print_tables(swept, model_name, costs)
        if plot is not None:
            print(f"The picture is in {plot}.")
    return EXIT_OK


def _formats(wanted: str) -> list[Format]:
    """The formats to try on each trace."""
    from tiercache.replay.formats.bailian import Bailian
    from tiercache.replay.formats.mooncake import Mooncake
    from tiercache.replay.formats.recorded import Recorded
    from tiercache.replay.formats.vllm import KvEvents

    known: dict[str, Format] = {one.name: one for one in (Recorded(), Bailian(), Mooncake(), KvEvents())}
    if wanted not in ("auto", *known):
        raise ConfigError(f"--format {wanted}: must be auto, {', '.join(known)}")
    return list(known.values()) if wanted == "auto" else [known[wanted]]


def _check_gpu(gpu: str) -> None:
    if gpu.isdigit():
        text = f"names a GPU or its memory (80GiB): an engine's own pool is --gpu-pool {gpu}"
        raise ConfigError(f"--gpu {gpu}: {text}")


def _check_hosts(hosts: int, spread: str) -> None:
    from tiercache.replay.hosts import MAX_HOSTS, SPREADS

    if not 1 <= hosts <= MAX_HOSTS:
        raise ConfigError(f"--hosts {hosts}: must be 1 to {MAX_HOSTS}")
    if spread not in SPREADS:
        raise ConfigError(f"--spread {spread}: must be one of: {', '.join(SPREADS)}")


def _policies(given: str | None) -> tuple[str, ...]:
    wanted = _parts(given)
    for policy in wanted:
        if problem := SETTINGS["policy"].kind.check(policy):
            raise ConfigError(f"--policy {policy}: {problem}")
    return wanted


def _parts(text: str | None) -> tuple[str, ...]:
    """The items between commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _costs(model: Model, gpu: Gpu, mfu: float, dram_bandwidth: str, nvme_bandwidth: str) -> Costs:
    """The costs of computing and loading, on the named GPU and disks."""
    from tiercache.replay.estimate import Costs

    dram = min(gpu.bus_bytes_per_s, as_bytes("--dram-bandwidth", dram_bandwidth, least=1))
    nvme = min(dram, as_bytes("--nvme-bandwidth", nvme_bandwidth, least=1))
    return Costs(model, gpu.flops * mfu, dram, nvme)


def _block_bytes(given: str | None, token_bytes: float) -> Callable[[int], int]:
    """The length of a block, from its number of tokens."""
    from tiercache.protocol.namespaces import MAX_BLOCK_BYTES

    fixed = None if given is None else as_bytes("--block-bytes", given)

    def block_bytes(block_tokens: int) -> int:
        size = round(block_tokens * token_bytes) if fixed is None else fixed
        if not 0 < size <= MAX_BLOCK_BYTES:
            text = f"a block of {block_tokens} tokens has {format_bytes(size)}, and the daemon's have at most "
            raise ConfigError(f"{text}{format_bytes(MAX_BLOCK_BYTES)}: say --block-bytes or another --model")
        return size

    return block_bytes


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
        print(f"tiercache: {trace.bad_lines} lines skipped, the first: {trace.first_problem}", file=sys.stderr)
    if trace.late_requests:
        text = "requests come later in the file than their time says, by more than the window for sorting"
        print(
            f"tiercache: {trace.path}: {trace.late_requests} {text}: played in the order of the file", file=sys.stderr
        )
    from tiercache.replay.formats.recorded import RecordedReader

    if isinstance(trace.reader, RecordedReader) and trace.reader.lost_requests:
        text = "requests were lost by the recording: the figures are of the others"
        print(f"tiercache: {trace.path}: {trace.reader.lost_requests} {text}", file=sys.stderr)
