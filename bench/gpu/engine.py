"""The engine with a model of Llama 3 8B's shape and random weights, made on the device: speed, and TTFT by tier.

decode, prefill    over transformers' generate() on the same weights; decode with CUDA graphs and without
cold               computed, by an engine without a cache        store    computed and stored meanwhile
dram               the pool was emptied: from the daemon         nvme     another daemon on the same disk
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu.place import DEVICE, GIB, MIB, REHEARSAL, seconds, sized, synchronize
from gpu.tell import Skip, check, checking, fact, figure, left_s, need, skip

LENGTHS = (8192, 32768) if not REHEARSAL else (128, 256)
NEEDS_S = {LENGTHS[0]: 20.0, LENGTHS[1]: 30.0}
ROUNDS = {LENGTHS[0]: 3, LENGTHS[1]: 2}
CONTEXT, BATCHES = sized(512, 32), (1, 8, 32) if not REHEARSAL else (1, 4)
FEW, MANY = sized(8, 2), sized(40, 6)
PREFILL = sized(4096, 64)
SHAPE = {
    "vocab_size": sized(128256, 512),
    "hidden_size": sized(4096, 64),
    "intermediate_size": sized(14336, 96),
    "num_hidden_layers": sized(32, 2),
    "num_attention_heads": sized(32, 4),
    "num_key_value_heads": sized(8, 2),
    "head_dim": sized(128, 16),
    "max_position_embeddings": 65536,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Model:
    """The model's folder, without weights, and its module, shared by all engines of this process."""

    def __init__(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig

        from tiercache.engine import engine, model

        self.folder = folder
        self._check, engine.check_model = engine.check_model, self._checked  # type: ignore[attr-defined]
        self.dtype = torch.float32 if REHEARSAL else torch.bfloat16
        self._module: Any = None
        LlamaConfig(**SHAPE, dtype=str(self.dtype).removeprefix("torch.")).save_pretrained(folder)
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
        model.AutoModelForCausalLM = SimpleNamespace(from_pretrained=self._made)  # type: ignore[attr-defined]

    def _made(self, *_: object, attn_implementation: str, **__: object) -> Any:
        module = self._module or self._make()
        if not REHEARSAL:  # on a CPU an engine repacks the weights of its module
            self._module = module
        module.set_attn_implementation(attn_implementation)
        return module

    def _checked(self, hosted: Any) -> None:
        """The engine's own test of a model: a failure is told, and the rest is measured all the same."""
        from tiercache.errors import ModelRefused

        try:
            self._check(hosted)
        except ModelRefused as error:
            check("the model computes over paged KV as on its own", False, str(error))
        else:
            check("the model computes over paged KV as on its own", True)

    def _make(self) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        with torch.device(DEVICE):
            module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), dtype=self.dtype)
        with torch.no_grad():
            for weight in module.parameters():
                weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
        return module.eval()

    def stock(self) -> Any:
        """As transformers runs it; no engine may run at the same time."""
        module = self._module or self._make()
        module.set_attn_implementation("sdpa")
        module.generation_config.eos_token_id = None
        return module

    def settings(self, **others: Any) -> Any:
        from tiercache.engine import EngineSettings

        fields = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": "cpu" if REHEARSAL else "cuda",
            "kv_cache_memory": sized(5 * GIB, 64 * MIB),
            "chunk_size": sized(2048, 64),
            "max_num_seqs": 32,
            "load_timeout_s": 30.0,
        }
        return EngineSettings(**{**fields, **others})


def run(_: Sequence[str]) -> None:
    """All of it, as far as the time goes."""
    import logging

    logging.getLogger("tiercache").setLevel(logging.ERROR)  # the daemon goes away on purpose
    with tempfile.TemporaryDirectory(prefix="tiercache-gpu-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        begin = time.perf_counter()
        model = Model(folder / "model")
        with checking("decode and prefill"):
            speeds(model, begin)
        with checking("TTFT by tier"):
            tiers(model, folder)


def prompt_of(length: int, seed: int) -> list[int]:
    import random

    shuffle = random.Random(seed)
    return [shuffle.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]


def greedy(count: int) -> Any:
    from tiercache.engine import SamplingParams

    return SamplingParams(max_tokens=count, ignore_eos=True)


def speeds(model: Model, begin: float) -> None:
    """Decode and prefill by the engine, with graphs and without, and by generate()."""
    from tiercache.engine import Engine

    decode: dict[int, float] = {}
    texts: dict[str, list[int]] = {}
    prompts = [prompt_of(CONTEXT, seed) for seed in range(max(BATCHES))]
    long = [prompt_of(PREFILL, 100 + number) for number in range(3)]
    with Engine(model.folder, model.settings()) as engine:
        figure("a first engine is ready after", time.perf_counter() - begin, "s")
        graphs = engine._model._graphs
        if graphs is None:
            fact("CUDA graphs", "none here")
        for batch in BATCHES:
            decode[batch] = step_s(lambda count, batch=batch: engine.generate(prompts[:batch], greedy(count)))
        texts["graphs"] = engine.generate(prompts[:1], greedy(MANY))[0].tokens
        if graphs is not None:
            check("no capture failed", not graphs._given_up)
            engine._model._graphs = None
            for batch in BATCHES:
                without = step_s(lambda count, batch=batch: engine.generate(prompts[:batch], greedy(count)))
                figure(f"decode of {batch}: without graphs over with", without / decode[batch], "x")
            texts["without graphs"] = engine.generate(prompts[:1], greedy(MANY))[0].tokens
            engine._model._graphs = graphs
            check("graphs give the same tokens", texts["graphs"] == texts["without graphs"])
        engine.generate([prompt_of(PREFILL, 99)], greedy(1))
        prefill = statistics.median(engine.generate([prompt], greedy(1))[0].ttft_s for prompt in long)
    for batch in BATCHES:
        figure(f"decode of {batch}", 1e3 * decode[batch], "ms")
    figure(f"prefill of {PREFILL}", PREFILL / prefill, "tokens/s")
    need(10)
    against_stock(model, prompts, long, decode, prefill, texts)


def step_s(generate: Callable[[int], object]) -> float:
    """Time of a step of decoding, from two lengths of text; prompts are in the cache."""
    generate(FEW)
    few, many = (
        statistics.median(seconds(lambda count=count: generate(count)) for _ in range(2)) for count in (FEW, MANY)
    )
    return max(many - few, 1e-9) / (MANY - FEW)


def against_stock(
    model: Model,
    prompts: list[list[int]],
    long: list[list[int]],
    decode: dict[int, float],
    prefill: float,
    texts: dict[str, list[int]],
) -> None:
    import torch

    stock = model.stock()

    def generate(asked: list[list[int]], count: int) -> Any:
        inputs = torch.tensor(asked, device=DEVICE)
        with torch.inference_mode():
            return stock.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    for batch in BATCHES:
        if left_s() < 8:
            raise Skip("out of time for generate()")
        stocks = step_s(lambda count, batch=batch: generate(prompts[:batch], count))
        figure(f"decode of {batch}: generate() over the engine", stocks / decode[batch], "x", at_least=1.0)
    generate(long[:1], 1)
    stocks = statistics.median(seconds(lambda prompt=prompt: generate([prompt], 1)) for prompt in long)
    figure(f"prefill of {PREFILL}: generate() over the engine", stocks / prefill, "x", at_least=1.0)
    expected = generate(prompts[:1], MANY)[0, CONTEXT:].tolist()
    same = next((at for at, pair in enumerate(zip(expected, texts["graphs"], strict=True)) if pair[0] != pair[1]), MANY)
    # In bfloat16 two ways of computing part at the first near tie; tests/gpu compares them in float32.
    fact("leading tokens equal to generate() in this dtype", f"{same} of {MANY}")


def tiers(model: Model, folder: Path) -> None:
    """TTFT of prompts by where their KV is."""
    need(25)
    from tiercache.client.launcher import launch
    from tiercache.engine import Engine, connect_to

    size = sized(10 * GIB, 128 * MIB)
    connectors: list[Any] = []

    def connect(namespace: Any, pool: Any) -> Any:
        connectors.append(connect_to(folder / "run", required=True)(namespace, pool))
        return connectors[-1]

    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
        disk: dict[str, Any] = {
            "nvme": str(folder / "nvme"),
            "nvme_size": size + sized(2 * GIB, 256 * MIB),
            "nvme_segment": sized(256, 64) * MIB,
        }
    except OSError as error:
        skip("TTFT from NVMe", f"no direct I/O in {folder}: {error.strerror}")
        disk = {}

    def start() -> Any:
        return stack.enter_context(launch(size, run_dir=folder / "run", grace=0, **disk))

    with ExitStack() as stack:
        daemon = start()
        plain = stack.enter_context(Engine(model.folder, model.settings()))
        cached = stack.enter_context(Engine(model.folder, model.settings(), connect))
        arena = connectors[0].client.session().arena
        while arena is not None and arena._populating:
            need(20)
            time.sleep(0.05)
        fact("the arena is held by", arena.registration if arena else "none")
        serve(plain, prompt_of(LENGTHS[0], 9)), serve(cached, prompt_of(LENGTHS[0], 9))  # a warm-up
        last: dict[int, tuple[list[int], Any, float]] = {}
        for length in LENGTHS:
            with checking(f"TTFT of {length} tokens"):
                need(NEEDS_S[length])
                last[length] = by_tier(plain, cached, length)
        if not disk:
            return
        wait_for_disk(daemon.address)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon = start()
        wait_until(lambda: connectors[0].available, "the engine has found the daemon")
        for length, (prompt, expected, cold) in last.items():
            with checking(f"TTFT of {length} tokens from NVMe"):
                need(8)
                cached.reset_pool()
                output = serve(cached, prompt)
                fact(f"{length}: tokens that the engine chose to load from NVMe", output.external_hit_tokens)
                if output.external_hit_tokens < length // 2:
                    need(8)
                    cached.reset_pool()
                    # Computing is made to look endless, so that the rest is loaded whatever the disk is like.
                    cached._cost.prefill_s = lambda start, end: 1e3 * (end - start)
                    output = serve(cached, prompt)
                    del cached._cost.prefill_s
                assert output.tokens == expected, "other tokens than cold"
                hit = output.external_hit_tokens
                assert hit > length // 2, f"{hit} tokens came from NVMe"
                figure(f"{length}: from NVMe", output.ttft_s, "s")
                figure(f"{length}: cold over from NVMe", cold / output.ttft_s, "x")


def by_tier(plain: Any, cached: Any, length: int) -> tuple[list[int], Any, float]:
    """Cold, stored and from DRAM, in turns; the last prompt, its tokens, and the cold time."""
    times: dict[str, list[float]] = {"cold": [], "store": [], "dram": []}
    for number in range(ROUNDS[length]):
        if times["dram"] and left_s() < 20:
            break
        prompt = prompt_of(length, 1000 * length + number)
        order = [("cold", plain), ("store", cached)]
        outputs = {}
        for name, engine in order if number % 2 else order[::-1]:
            engine.reset_pool()
            outputs[name] = serve(engine, prompt)
        cached.reset_pool()
        outputs["dram"] = serve(cached, prompt)
        hit = outputs["dram"].external_hit_tokens
        assert hit > length // 2, f"{hit} tokens came from DRAM"
        for name, output in outputs.items():
            times[name].append(output.ttft_s)
            assert output.tokens == outputs["cold"].tokens, f"{name} gives other tokens than cold"
    median = {name: statistics.median(values) for name, values in times.items()}
    fact(f"{length}: seconds", times)
    for name, value in median.items():
        figure(f"{length}: {name}", value, "s")
    figure(f"{length}: cold over from DRAM", median["cold"] / median["dram"], "x")
    ratios = [one / other for one, other in zip(times["store"], times["cold"], strict=True)]
    figure(f"{length}: storing over not storing", statistics.median(ratios), "x", at_most=1.03)
    return prompt, outputs["cold"].tokens, median["cold"]


def serve(engine: Any, prompt: list[int]) -> Any:
    """One prompt and a few tokens; transfers have ended when it returns."""
    synchronize()
    [output] = engine.generate([prompt], greedy(4))
    engine.drain()
    return output


def wait_for_disk(address: Any) -> None:
    """Until everything in DRAM is on disk too."""
    from tiercache.client.client import Client

    with Client.connect(address, map_arena=False, request_timeout_s=10.0) as client:

        def written() -> bool:
            found = client.stats()["tiers"]
            return bool(found["nvme"]["blocks"] >= found["dram"]["blocks"])

        wait_until(written, "the blocks are on disk")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    while not condition():
        if left_s() < 10:
            raise Skip(f"out of time before {what}")
        time.sleep(0.02)
