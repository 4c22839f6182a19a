"""Plays `tiercache demo --hosts 2` and prints it: a table of the runs, and a line for each thing that was seen."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tiercache.cli.demo.tables import DEFECT, prompt_table
from tiercache.demo.hosts import TwoHosts
from tiercache.demo.prompt import Run
from tiercache.ground.units import format_bytes


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
    """Whether all tokens agree, and every hit was one."""
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
