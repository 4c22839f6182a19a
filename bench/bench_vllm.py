"""Real vLLM with tiercache below it, beside vLLM alone, vLLM's own CPU tier and LMCache.

    cold       a prompt not seen before, with storing and without a connector
    local      the same prompt again, from vLLM's own pool
    dram       the same when the pool has been forgotten: from tiercache's DRAM, vLLM's CPU tier, LMCache's, and
               from tiercache's below vLLM's CPU tier ("tiered") when that has been forgotten too
    nvme       the same when DRAM has been emptied too (direct I/O: the page cache has no part in it)
    turns      conversations that do not fit into the pool: seconds for all of them
    hybrid     cold and from tiercache's DRAM, a model with recurrent states beside attention, 4096 tokens

All engines live in processes of their own throughout, one OpenMP thread each, and take turns. Seconds
are those of `LLM.generate` for one token. A random Qwen3 of 161 M parameters, blocks of 32.
Needs the environment of `make test-vllm`, and for LMCache the one of `vllm_lmcache.py`; without, its figures are null:
`PYTHONPATH=. .venv-vllm/bin/python bench/bench_vllm.py [--parts hits|turns|hybrid] [--tokens N] [--rounds N] [--dir D]`
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm_lmcache
from common import SEED, Report

import tiercache

median = statistics.median
VOCABULARY = 16384
BLOCK = 32
POOL_TOKENS = 13 << 10
TOKEN_NUMBERS = 6 << 10
NUMBER_BYTES = {"bfloat16": 2, "float32": 4}
CACHE_GIB = 2
PATIENCE_S = 5.0
"""Deadline of a request to the daemon, long enough that a busy machine does not look like a hung daemon."""
CONVERSATIONS, TURNS, TURN_TOKENS = 6, 4, 1000
PARTS = ("hits", "turns", "hybrid")
HYBRID_TOKENS = 4096


def fastest_dtype() -> str:
    """bfloat16 where the processor multiplies its matrices at a good speed; elsewhere it takes six times as long."""
    import torch

    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def build_model(folder: Path, dtype: str) -> None:
    """A random Qwen3 of 161 M parameters, 6 Ki numbers of KV a token."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)


def build_hybrid(folder: Path, dtype: str) -> None:
    """A random Qwen3-Next: three of four layers keep a state of 512 KiB, and blocks have 544 tokens or so."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=768,
        shared_expert_intermediate_size=768,
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)


class Candidate:
    """One engine; see `vllm_candidate.py`."""

    def __init__(self, model: Path, dtype: str, transfer: dict[str, Any] | None, log: Path) -> None:
        options = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": 9216,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": POOL_TOKENS * TOKEN_NUMBERS * NUMBER_BYTES[dtype],
            "seed": 0,
        }
        if transfer is not None:
            options["kv_transfer_config"] = {"kv_role": "kv_both", **transfer}
        command = [sys.executable, str(Path(__file__).with_name("vllm_candidate.py")), json.dumps(options)]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self._ready = False

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one order; returns its answer. The first waits until the engine has started: several start at once."""
        assert self._process.stdin is not None
        if not self._ready:
            self._ready = bool(self._read())
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def run(self, ids: list[int], *forget: str, cached: int | None = None) -> tuple[float, int]:
        """Seconds to the first token, and that token, after these orders.

        `cached` tokens at least must not have been computed.
        """
        for order in forget:
            assert self.ask(order)["done"]
        answer = self.ask("run", prompts=[ids], tokens=1)
        found = answer["cached"][0]
        if (cached is None and found) or (cached is not None and found < cached):
            raise RuntimeError(f"{found} tokens of {len(ids)} came from a cache")
        return answer["seconds"], answer["tokens"][0][0]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def prompt_of(tokens: int, name: str) -> list[int]:
    return random.Random(f"{SEED}/{name}").choices(range(3, VOCABULARY), k=tokens)


def offloading(spec: str, **settings: Any) -> dict[str, Any]:
    """vLLM's own offloading to a CPU, with a worker that runs on one; see `vllm_native.py`."""
    where = {"spec_name": spec, "spec_module_path": "vllm_native", "cpu_bytes_to_use": CACHE_GIB << 30}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {**where, **settings}}


def our_transfer(daemon: tiercache.LaunchedDaemon) -> dict[str, Any]:
    """Our connector, with a daemon."""
    return {
        "kv_connector": "TierCacheConnector",
        "kv_connector_module_path": "tiercache.connectors.vllm_v1",
        "kv_connector_extra_config": {"address": daemon.address, "request_timeout_s": PATIENCE_S},
    }


def connected(daemon: tiercache.LaunchedDaemon) -> tiercache.Client:
    return tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=PATIENCE_S)


def wait_for(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited too long for {what}")
        threading.Event().wait(0.05)


class Bench:
    """The engines and the daemon, and what was measured: seconds by (case, tokens)."""

    def __init__(self, stack: ExitStack, folder: Path, disk: Path, dtype: str) -> None:
        model = folder / "model"
        build_model(model, dtype)
        self.daemon = stack.enter_context(
            tiercache.launch(f"{CACHE_GIB}GiB", nvme=str(disk), nvme_size="8GiB", nvme_segment="256MiB")
        )
        self.client = stack.enter_context(connected(self.daemon))
        settings = {"address": self.daemon.address, "request_timeout_s": PATIENCE_S}
        tier = {"type": "TierCacheTier", "module_path": "tiercache.connectors.vllm_tier", **settings}
        transfers: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "ours": our_transfer(self.daemon),
            "native": offloading("MemcpySpec"),
            "tiered": offloading("MemcpyTieringSpec", secondary_tiers=[tier]),
        }
        if not vllm_lmcache.absence():
            server = vllm_lmcache.LMCacheServer(CACHE_GIB, folder / "lmcache-server")
            stack.callback(server.close)
            transfers["lmcache"] = server.transfer()
        self.engines: dict[str, Candidate] = {}
        for name, transfer in transfers.items():
            self.engines[name] = Candidate(model, dtype, transfer, folder / name)
            stack.callback(self.engines[name].close)
        self.peers = [name for name in self.engines if name not in ("plain", "ours")]
        self.seconds: dict[tuple[str, int], list[float]] = {}
        self.tokens_identical = True

    def _blocks(self, tier: str) -> int:
        return int(self.client.stats()["tiers"][tier]["blocks"])

    def one_round(self, tokens: int, number: int) -> None:
        """Every case once, each with a prompt of its own."""
        ids = prompt_of(tokens, f"{tokens} {number}")
        plain, ours = self.engines["plain"], self.engines["ours"]
        full = tokens // BLOCK * BLOCK
        self.client.flush()
        order = list(self.engines) if number % 2 else list(self.engines)[::-1]
        results = {f"cold_{name}": self.engines[name].run(ids, "forget") for name in order}
        for tier in ("dram", "nvme"):  # tiers of two engines, with their own names
            wait_for(lambda tier=tier: self._blocks(tier) >= 2 * full // BLOCK, f"all blocks to be in {tier}")
        results["local"] = plain.run(ids, cached=full - BLOCK)
        results["dram"] = ours.run(ids, "forget", cached=full - BLOCK)
        for name in self.peers:
            forget = ("forget", "offloaded") if name == "tiered" else ("forget",)
            results[name] = self.engines[name].run(ids, *forget, cached=full - 2 * BLOCK)
        self.client.flush(tier="dram")
        results["nvme"] = ours.run(ids, "forget", cached=full - BLOCK)
        self.tokens_identical &= len({token for _, token in results.values()}) == 1
        for case, (seconds, _) in results.items():
            self.seconds.setdefault((case, tokens), []).append(seconds)

    def turns(self) -> dict[str, float]:
        """Seconds of each engine for conversations of several turns. The engines take turns as well."""
        texts = {}
        for name, engine in self.engines.items():
            assert engine.ask("forget")["done"]
            texts[name] = [prompt_of(TURN_TOKENS, f"turn {number}") for number in range(CONVERSATIONS)]
        seconds = dict.fromkeys(self.engines, 0.0)
        for turn in range(TURNS):
            for name in list(self.engines)[:: 1 if turn % 2 else -1]:
                for number in range(CONVERSATIONS):
                    answer = self.engines[name].ask("run", prompts=[texts[name][number]], tokens=16)
                    seconds[name] += answer["seconds"]
                    texts[name][number] += answer["tokens"][0] + prompt_of(TURN_TOKENS, f"turn {turn} {number}")
        return seconds

    def ratios(self, case: str, base: str, tokens: int) -> list[float]:
        return [a / b for a, b in zip(self.seconds[case, tokens], self.seconds[base, tokens], strict=True)]


def _rests(client: tiercache.Client) -> bool:
    """Whether the daemon has blocks, and no further ones have come lately."""
    before = client.stats()["tiers"]["dram"]["blocks"]
    threading.Event().wait(0.3)
    return bool(0 < before == client.stats()["tiers"]["dram"]["blocks"])


def add_hybrid(report: Report, folder: Path, dtype: str, rounds: int) -> None:
    """A hybrid's hits: one state, and the blocks of a few layers."""
    build_hybrid(folder / "hybrid", dtype)
    cold, dram = [], []
    with ExitStack() as stack:
        daemon = stack.enter_context(tiercache.launch(f"{CACHE_GIB}GiB"))
        client = stack.enter_context(connected(daemon))
        engine = Candidate(folder / "hybrid", dtype, our_transfer(daemon), folder / "hybrid-log")
        stack.callback(engine.close)
        for number in range(-1, rounds):
            ids = prompt_of(HYBRID_TOKENS, f"hybrid {number}")
            client.flush()
            first = engine.run(ids, "forget")
            engine.run(prompt_of(BLOCK, "other"), cached=0)  # a step more: the last stores begin with it
            wait_for(lambda: _rests(client), "the last stores to end")
            again = engine.run(ids, "forget", cached=HYBRID_TOKENS * 3 // 4)
            if number >= 0:  # the first is a warm-up
                cold.append(first[0])
                dram.append(again[0])
    for key, values in (("hybrid_cold_s", cold), ("hybrid_dram_s", dram)):
        report.add(key, f"{key.replace('_', ' ')}, {HYBRID_TOKENS} tokens", median(values), "s", samples=values)
    ratios = [hit / computed for hit, computed in zip(dram, cold, strict=True)]
    label = f"a hybrid's DRAM hit over its cold prefill, {HYBRID_TOKENS}"
    report.add("hybrid_dram_hit_over_cold", label, median(ratios), at_most=0.3, samples=ratios)


def add_hits(report: Report, bench: Bench, lengths: list[int]) -> None:
    """Seconds of every case, and the ratios at the greatest length."""
    for tokens in lengths:
        for case in (*(f"cold_{name}" for name in bench.engines), "local", "dram", "nvme", *bench.peers):
            values = bench.seconds[case, tokens]
            report.add(f"{case}_{tokens}_s", f"{case}, {tokens} tokens", median(values), "s", samples=values)
    ratios = [
        ("dram_hit_over_local_hit", "dram", "local", 1.0),
        ("nvme_hit_over_local_hit", "nvme", "local", 1.5),
        ("cold_over_no_connector", "cold_ours", "cold_plain", 1.03),
    ]
    for peer in bench.peers:
        ratios += [
            (f"{peer}_hit_over_local_hit", peer, "local", None),
            (f"{peer}_cold_over_no_connector", f"cold_{peer}", "cold_plain", None),
            (f"dram_hit_over_{peer}_hit", "dram", peer, 1.0),
        ]
    for key, case, base, limit in ratios:
        values = bench.ratios(case, base, max(lengths))
        label = f"{key.replace('_', ' ')}, {max(lengths)}"
        report.add(key, label, median(values), at_most=limit, samples=values)


def add_hooks(report: Report, hooks: dict[str, dict[str, Any]], prefix: str, limit_us: float | None = 20) -> None:
    """What each hook costs vLLM's scheduler thread: on the clock, and of that its own work.

    The rest is other threads' and processes' turns on the same cores: what a quiet machine has not.
    """
    for name, figures in hooks.items():
        for kind, key in (("wall", ""), ("thread", "_thread")):
            part = figures[kind]
            label = f"{prefix.replace('_', ' ')} {name}, {kind} p99 of {figures['calls']}"
            label += f" (p50 {part['p50']:.1f}, max {part['max']:.0f})"
            limit = None if name == "nothing" else limit_us
            report.add(f"{prefix}_{name}{key}_us_p99", label, part["p99"], "us", at_most=limit)
    collected = {name: figures["collector"]["max"] for name, figures in hooks.items() if figures["collector"]["sum"]}
    report.note(f"{prefix}: longest collection of garbage in a hook, us: {collected or 'none'}")


def add_turns(report: Report, bench: Bench) -> None:
    """Conversations: seconds of each engine, and ours over the peers'."""
    times = bench.turns()
    for name, seconds in times.items():
        report.add(f"turns_{name}_s", f"conversations larger than the pool, {name}", seconds, "s")
    for peer in bench.peers:
        report.add(f"turns_over_{peer}", f"the same, ours / {peer}", times["ours"] / times[peer], at_most=1.0)


def add_engines(report: Report, bench: Bench, args: argparse.Namespace) -> None:
    """What all engines take part in."""
    bench.one_round(min(args.tokens), -1)  # a warm-up
    bench.seconds.clear()
    if "hits" in args.parts:
        for number in range(args.rounds):
            for tokens in args.tokens:
                bench.one_round(tokens, number)
        add_hits(report, bench, args.tokens)
    if "turns" in args.parts:
        add_turns(report, bench)
    add_hooks(report, bench.engines["ours"].ask("hooks"), "hook")
    add_hooks(report, bench.engines["tiered"].ask("hooks"), "tier_hook", limit_us=None)
    report.note(f"numbers of {args.dtype}")
    if "hits" in args.parts:
        report.add("tokens_identical", "tokens identical in every case", float(bench.tokens_identical), at_least=1)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=NUMBER_BYTES, default=fastest_dtype())
    parser.add_argument("--dir", type=Path, help="where the NVMe tier is; by default a temporary directory")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all processes end with this one
    report = Report("bench_vllm")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir)))
        if "hybrid" in args.parts:
            add_hybrid(report, folder, args.dtype, args.rounds)
        if args.parts != ["hybrid"]:
            add_engines(report, Bench(stack, folder, disk, args.dtype), args)
    if vllm_lmcache.absence():
        keys = ("lmcache_hit_over_local_hit", "dram_hit_over_lmcache_hit", "turns_lmcache_s", "turns_over_lmcache")
        report.leave_out(keys, vllm_lmcache.absence())
    report.finish()


if __name__ == "__main__":
    main()
