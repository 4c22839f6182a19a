"""`tiercache plan`: the size of a model's KV, how much the tiers hold, and when loading pays. No GPU, no network."""

from __future__ import annotations

from typing import Any, NamedTuple

from tiercache.cli.exits import EXIT_OK
from tiercache.cli.machine import as_bytes, check_mfu, find_gpu
from tiercache.cli.report import Section, print_json, print_sections, with_human
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration
from tiercache.plan.model import KV_DTYPES, Model, load_model
from tiercache.plan.sizes import Form, Plant, plan

DEFAULT_LENGTHS = (2048, 8192, 32768, 131072)
MAX_BLOCK_SIZE = 4096
_NAMES = {"gpu": "GPU", "dram": "DRAM", "nvme": "NVMe"}
_SAME = {"bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


class Options(NamedTuple):
    """The command line: sizes and bandwidths as text, None where a flag was not given."""

    model: str
    gpu: str
    utilization: float
    gpus: int
    overhead: str
    weights: str | None
    kv_dtype: str
    block_size: int
    lengths: tuple[int, ...]
    dram: str
    nvme: str
    tokens_per_s: float | None
    requests_per_s: float | None
    tflops: float | None
    mfu: float
    bus: str | None
    dram_bandwidth: str
    nvme_bandwidth: str
    as_json: bool


def run(options: Options) -> int:
    """Print the plan. Raises ConfigError, one line with a remedy."""
    model = load_model(options.model)
    dtype = _SAME.get(options.kv_dtype, options.kv_dtype)
    if dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {options.kv_dtype}: is none of {', '.join((*KV_DTYPES, *_SAME))}")
    if model.heads % options.gpus:
        text = f"{model.name} has {model.heads} attention heads: give a number that divides them"
        raise ConfigError(f"--tensor-parallel-size {options.gpus}: {text}")
    form = Form(model, dtype, options.block_size, options.gpus)
    lengths = _lengths(options, model)
    tree = plan(model, form, _plant(options, model), lengths, _tokens_per_s(options, lengths))
    if options.as_json:
        print_json(with_human(tree))
    else:
        print_sections(_sections(tree, options))
        for line in _sentences(tree):
            print(f"\n{line}")
    return EXIT_OK


def _lengths(options: Options, model: Model) -> list[int]:
    if any(length < 1 for length in options.lengths):
        raise ConfigError("--length is a number of tokens, from 1 on")
    most = model.max_tokens or DEFAULT_LENGTHS[-1]
    return list(options.lengths) or [length for length in DEFAULT_LENGTHS if length <= most] or [most]


def _tokens_per_s(options: Options, lengths: list[int]) -> float:
    if options.tokens_per_s is not None and options.requests_per_s is not None:
        raise ConfigError("give either --tokens-per-s or --requests-per-s")
    if options.requests_per_s is not None and len(options.lengths) != 1:
        raise ConfigError("--requests-per-s needs the mean length of a request: one --length")
    rate = options.tokens_per_s if options.requests_per_s is None else options.requests_per_s * lengths[0]
    if rate is not None and not rate > 0:
        raise ConfigError("--tokens-per-s and --requests-per-s are more than 0")
    return rate or 0.0


def _plant(options: Options, model: Model) -> Plant:
    gpu = find_gpu(options.gpu, options.tflops, options.bus)
    if not 0 < options.utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {options.utilization:g}: must be above 0, at most 1")
    check_mfu(options.mfu)
    weights = model.weights_bytes() if options.weights is None else as_bytes("--weights", options.weights)
    return Plant(
        gpu=gpu,
        gpus=options.gpus,
        utilization=options.utilization,
        overhead_bytes=as_bytes("--overhead", options.overhead),
        weights_bytes=weights,
        mfu=options.mfu,
        dram_bytes=as_bytes("--dram", options.dram),
        nvme_bytes=as_bytes("--nvme", options.nvme),
        dram_bytes_per_s=as_bytes("--dram-bandwidth", options.dram_bandwidth, least=1),
        nvme_bytes_per_s=as_bytes("--nvme-bandwidth", options.nvme_bandwidth, least=1),
    )


# --- output --------------------------------------------------------------------------------------


def _sections(tree: dict[str, Any], options: Options) -> list[Section]:
    model, kv, gpu = tree["model"], tree["kv"], tree["gpu"]
    heads = f"{model['kv_heads']} KV heads of {model['head_dim']}"
    attention = f"a latent of {model['latent']}" if model["latent"] else heads
    if model["windowed_layers"]:
        attention += f"; {model['windowed_layers']} layers look back {model['window_tokens']:,} tokens"
    parameters = f"{model['parameters'] / 1e9:.1f}B parameters"
    if model["active_parameters"] < model["parameters"] / 2:
        parameters += f", {model['active_parameters'] / 1e9:.1f}B active"
    rows: list[tuple[str, ...]] = [
        ("model", f"{model['name']}: {parameters}, {model['layers']} layers, {attention}"),
        ("KV of a token", f"{_exact(kv['token_bytes'])} in {kv['dtype']}, all layers"),
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
    formats: list[tuple[str, ...]] = [
        (one["dtype"], _exact(one["token_bytes"]), f"{one['times_the_tokens']:.2f}x") for one in kv["formats"]
    ]
    tiers = [
        (
            _NAMES[one["tier"]],
            f"{one['blocks']:,}",
            f"{one['tokens']:,}",
            *(["-"] if one["holds_s"] is None else [_long(one["holds_s"])]),
        )
        for one in tree["tiers"]
    ]
    sequences = [
        (f"{one['tokens']:,}", format_bytes(one["bytes"]), *(f"{one[place]:,}" for place in _places(tree)))
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
        Section("plan", ("", ""), rows),
        Section("formats", ("KV format", "a token", "tokens"), formats),
        Section("what a tier holds", ("tier", "blocks", "tokens", "of this traffic"), tiers),
        Section("sequences at once", ("tokens", "KV", *names), sequences),
        Section("compute or load", ("tokens", "compute", *map("from {}".format, names[1:]), "load pays above"), loads),
    ]


def _places(tree: dict[str, Any]) -> list[str]:
    return [f"in_{one['tier']}" for one in tree["tiers"]]


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
        text += f"; loading it from {_NAMES[tier]} is {verdict}"
    lines = [f"{text}. Below {one['break_even_bytes_per_s'] / 1e9:.2f} GB/s computing wins."]
    model = tree["model"]
    if model["windowed_layers"]:
        lines.append(
            "Sequences are counted as engines hold them that free what has left a window; tiers keep all blocks."
        )
    return lines
