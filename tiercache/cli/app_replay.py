"""The command that plays traces on caches of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.command_line import MEASURE, Json, app, ending
from tiercache.cli.machine import Bus, DramBandwidth, KvDtype, Mfu, NvmeBandwidth, Tflops


@app.command(
    rich_help_panel=MEASURE,
    epilog=ending(
        """\
  tiercache replay conversation_trace.jsonl --dram 5% --nvme 5x
  tiercache replay trace.jsonl.gz --dram 1%,2%,5%,10%,20% --nvme 5x --plot sizes.svg
                                      a sweep, as a table and a picture
  tiercache replay trace.jsonl.gz --dram 2%,5% --policy lru,hazard
                                      policies side by side
  tiercache replay run.jsonl.gz       what `tiercache daemon --record` wrote, at its own sizes
  tiercache replay run.jsonl.gz --dram 64GiB,128GiB --nvme 2TiB --json
  tiercache replay qwen_traceB_blksz_16.jsonl --dram 200000 --model Qwen3-32B --gpu-pool 50000
  tiercache replay kv_events.jsonl --dram 5%
                                      batches of KV events, one a line
""",
        "0 done, 2 a wrong command line or a trace that cannot be read",
    ),
)
def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="JSON lines, packed (gzip) or not; each is played alone.")
    ],
    form: Annotated[
        str,
        typer.Option("--format", metavar="auto|mooncake|bailian|vllm|recorded", help="Of the traces."),
    ] = "auto",
    dram: Annotated[
        str | None,
        typer.Option(
            "--dram",
            metavar="SIZE[,..]",
            help="Blocks (20000), bytes (64GiB) or a share of the trace's different blocks (5%), or several of them "
            "for a sweep (default: that of the daemon that was recorded).",
        ),
    ] = None,
    nvme: Annotated[
        str, typer.Option("--nvme", metavar="SIZE", help="As --dram, or 5x for five times that; 0: none.")
    ] = "0",
    gpu_pool: Annotated[
        str, typer.Option("--gpu-pool", metavar="SIZE", help="An engine's own KV pool in front, as --dram; 0: none.")
    ] = "0",
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME[,..]",
            help="As the daemon's setting, or several to compare (default: the recorded one, or the daemon's).",
        ),
    ] = None,
    write_budget: Annotated[
        str, typer.Option("--write-budget", metavar="SIZE", help="As the daemon's nvme_write_budget; 0: no limit.")
    ] = "0",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose KV and work it is, as `tiercache plan` takes it.")
    ] = "Llama-3.1-8B",
    kv_dtype: KvDtype = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size", metavar="N", help="Tokens of a block (default: guessed from the lengths, or 512)."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option("--block-bytes", metavar="SIZE", help="Of a block (default: the model's).")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME|SIZE", help="What computes the prompts: H100, A100, L4, ...")
    ] = "H100",
    tflops: Tflops = None,
    mfu: Mfu = 0.5,
    bus: Bus = None,
    dram_bandwidth: DramBandwidth = "150GB",
    nvme_bandwidth: NvmeBandwidth = "6GB",
    optimum: Annotated[
        bool,
        typer.Option(
            "--optimum/--no-optimum",
            help="Compare with the offline optimum. It needs a pass of its own, and memory: 16 bytes for each block "
            "asked for and some 200 for each different one.",
        ),
    ] = True,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Run all of the daemon's code, leases and write queues included; six times slower."
        ),
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave lines out that are no good; count them.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates over sizes: .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Play a trace on caches of other sizes: hit rates by tier, time saved, and the best that is possible."""
    from tiercache.cli import replay as command

    return command.run(
        command.Options(
            traces=traces,
            format=form,
            dram=dram,
            nvme=nvme,
            gpu_pool=gpu_pool,
            policy=policy,
            write_budget=write_budget,
            model=model,
            kv_dtype=kv_dtype,
            block_size=block_size,
            block_bytes=block_bytes,
            gpu=gpu,
            tflops=tflops,
            mfu=mfu,
            bus=bus,
            dram_bandwidth=dram_bandwidth,
            nvme_bandwidth=nvme_bandwidth,
            optimum=optimum,
            exact=exact,
            skip_bad=skip_bad,
            plot=plot,
            as_json=as_json,
        )
    )
