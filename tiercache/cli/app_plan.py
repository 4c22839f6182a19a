"""The command that sizes a deployment on paper."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.cli.command_line import MEASURE, Json, app, ending
from tiercache.cli.machine import Bus, DramBandwidth, KvDtype, Mfu, NvmeBandwidth, Tflops


@app.command(
    rich_help_panel=MEASURE,
    epilog=ending(
        """\
  tiercache plan Llama-3.1-8B --gpu H100 --dram 256GiB --nvme 4TiB
  tiercache plan ./my-model --gpu 80GiB --tflops 989 --tensor-parallel-size 4
                                      a config.json or its folder; nothing is loaded
  tiercache plan Qwen3-32B --gpu H200 --kv-cache-dtype int8 --length 16384 --requests-per-s 3
  tiercache plan Mistral-7B-v0.1 --json | jq .loads
""",
        "0 done, 2 a wrong command line, an unknown model, or one that does not fit",
    ),
)
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder or config.json, or a name such as Llama-3.1-8B.")
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME|SIZE", help="A GPU (H100, A100, L4, ...) or its memory.")
    ] = "80GiB",
    utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="What the engine may take of it.")
    ] = 0.9,
    gpus: Annotated[int, typer.Option("--tensor-parallel-size", metavar="N", min=1, help="GPUs, each a shard.")] = 1,
    overhead: Annotated[
        str, typer.Option("--overhead", metavar="SIZE", help="On each GPU beside weights and KV: activations, graphs.")
    ] = "2GiB",
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="SIZE", help="All weights (default: from the configuration).")
    ] = None,
    kv_dtype: KvDtype = "auto",
    block_size: Annotated[
        int, typer.Option("--block-size", metavar="N", min=1, max=4096, help="Tokens in a block.")
    ] = 16,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", metavar="N", help="Tokens of a sequence (may be repeated; default: some)."),
    ] = None,
    dram: Annotated[str, typer.Option("--dram", metavar="SIZE", help="The daemon's --arena; 0: none.")] = "64GiB",
    nvme: Annotated[str, typer.Option("--nvme", metavar="SIZE", help="The daemon's --nvme-size; 0: none.")] = "1TiB",
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", metavar="N", help="New tokens a second, prompts and answers.")
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option("--requests-per-s", metavar="N", help="Or requests a second of one --length.")
    ] = None,
    tflops: Tflops = None,
    mfu: Mfu = 0.5,
    bus: Bus = None,
    dram_bandwidth: DramBandwidth = "150GB",
    nvme_bandwidth: NvmeBandwidth = "6GB",
    as_json: Json = False,
) -> int:
    """Size a deployment on paper: KV per token, what each tier holds, and when loading beats computing."""
    from tiercache.cli import plan as command

    return command.run(
        command.Options(
            model=model,
            gpu=gpu,
            utilization=utilization,
            gpus=gpus,
            overhead=overhead,
            weights=weights,
            kv_dtype=kv_dtype,
            block_size=block_size,
            lengths=tuple(lengths or ()),
            dram=dram,
            nvme=nvme,
            tokens_per_s=tokens_per_s,
            requests_per_s=requests_per_s,
            tflops=tflops,
            mfu=mfu,
            bus=bus,
            dram_bandwidth=dram_bandwidth,
            nvme_bandwidth=nvme_bandwidth,
            as_json=as_json,
        )
    )
