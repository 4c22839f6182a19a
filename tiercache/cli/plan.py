"""`tiercache plan`: the size of a model's KV, how much the tiers hold, and when loading pays. No GPU, no network."""

from __future__ import annotations

from typing import Annotated, Any

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
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration

DEFAULT_LENGTHS = (2048, 8192, 32768, 131072)
_NAMES = {"gpu": "GPU", "dram": "DRAM", "nvme": "NVMe", "shared": "shared"}
_PLACES = {**_NAMES, "shared": "the shared store"}
_SAME = {"bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


@command(
    "plan",
    """\
  tiercache plan Llama-3.1-8B --gpu H100 --dram 256GiB --nvme 4TiB
  tiercache plan ./my-model --gpu 80GiB --tflops 989 --tensor-parallel-size 4
                                      a config.json or its folder; nothing is loaded
  tiercache plan Qwen3-32B --gpu H200 --kv-cache-dtype int8 --length 16384 --requests-per-s 3
  tiercache plan Qwen3-32B --gpu H200 --shared 8TiB --shared-bandwidth 25Gbit/s
                                      with a store that hosts share
  tiercache plan Mistral-7B-v0.1 --json | jq .loads
""",
    "0 done, 2 a wrong command line, an unknown model, or one that does not fit",
)
def plan(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder or config.json, or a name such as Llama-3.1-8B.")
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME|SIZE", help="A GPU (H100, A100, L4, ...) or its memory.")
    ] = "80GiB",
    utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Share of its memory for the engine.")
    ] = 0.9,
    gpus: Annotated[
        int, typer.Option("--tensor-parallel-size", metavar="N", min=1, help="Number of GPUs, one shard each.")
    ] = 1,
    overhead: Annotated[
        str, typer.Option("--overhead", metavar="SIZE", help="Memory on each GPU for activations and graphs.")
    ] = "2GiB",
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="SIZE", help="All weights (default: from the configuration).")
    ] = None,
    kv_dtype: KvDtype = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            metavar="N",
            min=1,
            max=4096,
            help="Tokens in a block (default: 16; for a model with recurrent layers as vLLM chooses).",
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", metavar="N", help="Tokens of a sequence (repeatable; default: several)."),
    ] = None,
    dram: Annotated[str, typer.Option("--dram", metavar="SIZE", help="The daemon's --arena; 0: none.")] = "64GiB",
    nvme: Annotated[str, typer.Option("--nvme", metavar="SIZE", help="The daemon's --nvme-size; 0: none.")] = "1TiB",
    shared: Annotated[
        str,
        typer.Option(
            "--shared",
            metavar="SIZE",
            help="Bytes of blocks in the store that hosts share; 0: none. Valkey needs up to a third more memory.",
        ),
    ] = "0",
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", metavar="N", help="New tokens per second, of prompts and answers.")
    ] = None,
    requests_per_s: Annotated[
        float | None,
        typer.Option("--requests-per-s", metavar="N", help="Or requests per second, each of one --length."),
    ] = None,
    tflops: Tflops = None,
    mfu: Mfu = 0.5,
    bus: Bus = None,
    dram_bandwidth: DramBandwidth = "150GB",
    nvme_bandwidth: NvmeBandwidth = "6GB",
    shared_bandwidth: SharedBandwidth = "10Gbit",
    shared_round_trip: SharedRoundTrip = "0.5ms",
    as_json: Json = False,
) -> int:
    """Size a deployment on paper: KV per token, what each tier holds, and when loading beats computing."""
    from tiercache.plan import sizes
    from tiercache.plan.model import KV_DTYPES, load_model

    model = load_model(name)
    dtype = _SAME.get(kv_dtype, kv_dtype)
    if dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {kv_dtype}: is none of {', '.join((*KV_DTYPES, *_SAME))}")
    if model.heads % gpus:
        text = f"{model.name} has {model.heads} attention heads: give a number that divides them"
        raise ConfigError(f"--tensor-parallel-size {gpus}: {text}")
    tokens = _lengths(lengths or [], model.max_tokens)
    card = find_gpu(gpu, tflops, bus)
    if not 0 < utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {utilization:g}: must be above 0, at most 1")
    check_mfu(mfu)
    plant = sizes.Plant(
        gpu=card,
        gpus=gpus,
        utilization=utilization,
        overhead_bytes=as_bytes("--overhead", overhead),
        weights_bytes=model.weights_bytes() if weights is None else as_bytes("--weights", weights),
        mfu=mfu,
        dram_bytes=as_bytes("--dram", dram),
        nvme_bytes=as_bytes("--nvme", nvme),
        dram_bytes_per_s=as_bytes("--dram-bandwidth", dram_bandwidth, least=1),
        nvme_bytes_per_s=as_bytes("--nvme-bandwidth", nvme_bandwidth, least=1),
        shared_bytes=as_bytes("--shared", shared),
        shared_bytes_per_s=as_rate("--shared-bandwidth", shared_bandwidth),
        shared_round_trip_s=as_seconds("--shared-round-trip", shared_round_trip),
    )
    traffic = _tokens_per_s(tokens_per_s, requests_per_s, lengths or [])
    form = sizes.Form(model, dtype, block_size or sizes.usual_block_size(model, dtype, gpus), gpus)
    tree = sizes.plan(model, form, plant, tokens, traffic)
    if as_json:
        print_json(with_human(tree))
        return EXIT_OK
    print_sections(_sections(tree))
    for line in _sentences(tree):
        print(f"\n{line}")
    return EXIT_OK


def _lengths(given: list[int], most: int) -> list[int]:
    """Lengths of sequences to show: those given, or some that a model of at most `most` tokens (0: any) takes."""
    if any(length < 1 for length in given):
        raise ConfigError("--length is a number of tokens, from 1 on")
    most = most or DEFAULT_LENGTHS[-1]
    return given or [length for length in DEFAULT_LENGTHS if length <= most] or [most]


def _tokens_per_s(tokens_per_s: float | None, requests_per_s: float | None, lengths: list[int]) -> float:
    """The traffic; 0 if it was not given."""
    if tokens_per_s is not None and requests_per_s is not None:
        raise ConfigError("give either --tokens-per-s or --requests-per-s")
    if requests_per_s is not None and len(lengths) != 1:
        raise ConfigError("--requests-per-s needs the mean length of a request: one --length")
    rate = tokens_per_s if requests_per_s is None else requests_per_s * lengths[0]
    if rate is not None and not rate > 0:
        raise ConfigError("--tokens-per-s and --requests-per-s are more than 0")
    return rate or 0.0


# --- output --------------------------------------------------------------------------------------


def _sections(tree: dict[str, Any]) -> list[Section]:
    formats = [
        (one["dtype"], _exact(one["token_bytes"]), f"{one['times_the_tokens']:.2f}x") for one in tree["kv"]["formats"]
    ]
    tiers = [
        (
            _NAMES[one["tier"]],
            f"{one['blocks']:,}",
            f"{one['tokens']:,}",
            "-" if one["holds_s"] is None else _long(one["holds_s"]),
        )
        for one in tree["tiers"]
    ]
    sequences = [
        (
            f"{one['tokens']:,}",
            format_bytes(one["bytes"]),
            *(f"{one['in_' + tier['tier']]:,}" for tier in tree["tiers"]),
        )
        for one in tree["sequences"]
    ]
    loads = [
        (
            f"{one['tokens']:,}",
            format_duration(one["compute_s"]),
            *(_load_cell(one, tier) for tier in _below(tree)),
            f"{one['break_even_bytes_per_s'] / 1e9:.2f} GB/s",
        )
        for one in tree["loads"]
    ]
    names = [_NAMES[one["tier"]] for one in tree["tiers"]]
    return [
        Section("plan", ("", ""), _facts(tree)),
        Section("formats", ("KV format", "a token", "tokens"), formats),
        Section("what a tier holds", ("tier", "blocks", "tokens", "of this traffic"), tiers),
        Section("sequences at once", ("tokens", "KV", *names), sequences),
        Section("compute or load", ("tokens", "compute", *map("from {}".format, names[1:]), "load pays above"), loads),
    ]


def _facts(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """The model, its KV and the GPU's pool, a row each."""
    model, kv, gpu = tree["model"], tree["kv"], tree["gpu"]
    heads = f"{model['kv_heads']} KV heads of {model['head_dim']}"
    attention = f"a latent of {model['latent']}" if model["latent"] else heads
    if model["windowed_layers"]:
        attention += f"; {model['windowed_layers']} layers look back {model['window_tokens']:,} tokens"
    if model["state_layers"]:
        attention += f"; {model['state_layers']} layers keep a state"
    parameters = f"{model['parameters'] / 1e9:.1f}B parameters"
    if model["active_parameters"] < model["parameters"] / 2:
        parameters += f", {model['active_parameters'] / 1e9:.1f}B active"
    states = []
    if tree["state"] is not None:
        figure = f"{format_bytes(tree['state']['bytes'])}, as much as the KV of {tree['state']['as_tokens']:,} tokens"
        states = [("a state", figure)]
    return [
        ("model", f"{model['name']}: {parameters}, {model['layers']} layers, {attention}"),
        ("KV of a token", f"{_exact(kv['token_bytes'])} in {kv['dtype']}, all layers"),
        *states,
        (
            "a block",
            f"{kv['block_size']} tokens: {format_bytes(kv['gpu_block_bytes'])} on each GPU, "
            f"{format_bytes(kv['tier_block_bytes'])} in a tier",
        ),
        (
            "KV pool",
            f"{format_bytes(gpu['pool_bytes'])} on each of {gpu['gpus']} GPU(s) beside weights of "
            f"{format_bytes(model['weights_bytes'] / gpu['gpus'])}: {gpu['pool_blocks']:,} blocks, "
            f"{gpu['pool_tokens']:,} tokens",
        ),
    ]


def _below(tree: dict[str, Any]) -> list[str]:
    """The configured tiers below the GPU."""
    return [one["tier"] for one in tree["tiers"][1:]]


def _load_cell(one: dict[str, Any], tier: str) -> str:
    load_s = one[f"{tier}_s"]
    return f"{format_duration(load_s)} ({one['compute_s'] / load_s:.3g}x)"


def _exact(token_bytes: float) -> str:
    return f"{token_bytes / 1024:,.3f}".rstrip("0").rstrip(".") + " KiB"


def _long(seconds: float) -> str:
    return format_duration(seconds) if seconds < 3 * 3600 else f"{seconds / 3600:,.1f} h"


def _sentences(tree: dict[str, Any]) -> list[str]:
    """The conclusions from the tables."""
    one = tree["loads"][-1]
    text = f"A prefix of {one['tokens']:,} tokens is computed in {format_duration(one['compute_s'])}"
    for tier in _below(tree):
        verdict = "faster" if one[f"{tier}_s"] < one["compute_s"] else "slower"
        text += f"; loading it from {_PLACES[tier]} is {verdict}"
    lines = [f"{text}. Below {one['break_even_bytes_per_s'] / 1e9:.2f} GB/s computing wins."]
    if tree["shared"] is not None:
        lines.append(_shared_sentence(tree["shared"]))
    model = tree["model"]
    if model["windowed_layers"]:
        lines.append(
            "The sequences at once assume an engine that frees the blocks outside the window; tiers keep all blocks."
        )
    if tree["state"] is not None:
        lines.append(_state_sentence(tree["state"]))
    return lines


def _state_sentence(state: dict[str, Any]) -> str:
    figure = f"{format_bytes(state['bytes'])}, as much as the KV of {state['as_tokens']:,} tokens"
    return (
        f"A state is {figure}, however long its sequence. Sequences and loads count one each; the blocks and tokens "
        "that a tier holds are without states. vLLM stores one at the last full block of a prompt, and one more at the "
        "end of each step of a long prompt."
    )


def _shared_sentence(shared: dict[str, Any]) -> str:
    network = f"{shared['bytes_per_s'] / 1e9:.3g} GB/s and round trips of {format_duration(shared['round_trip_s'])}"
    if shared["pays_from_tokens"] is None:
        return f"With {network}, no hit in the shared store pays: engines compute instead."
    return f"With {network}, a hit in the shared store pays from {shared['pays_from_tokens']:,} tokens on."
