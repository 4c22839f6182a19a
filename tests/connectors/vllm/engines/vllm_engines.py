"""vLLM engines in child processes, tiny models for them, and daemons that are not as they should be."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import waiting

import tiercache
from tiercache.client.launcher import LaunchedDaemon
from tiercache.config.daemon_config import session_socket_path

VOCABULARY = 512
BLOCK = 32
PATIENCE_S = 100.0
"""How long a test waits for what must come: a busy machine is not a defect."""
wait_until = partial(waiting.wait_until, timeout_s=90.0)
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Large, so that the logits of a random model differ and greedy text does not repeat one token.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(folder: Path, config_class: str = "Qwen3Config", seed: int = 0, **options: Any) -> str:
    """A random model with a tokenizer of as many words; returns its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**COMMON, **options})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0").save_pretrained(folder)
    return str(folder)


def save_window_model(folder: Path) -> str:
    """One whose first and third layer see the last 100 tokens only."""
    layers = ["sliding_attention", "full_attention"] * 2
    return save_model(folder, "Gemma3TextConfig", sliding_window=100, layer_types=layers, query_pre_attn_scalar=32)


def transfer_config(address: str, module: str = "tiercache.connectors.vllm_v1", **settings: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` would be given."""
    return {
        "kv_connector": "TierCacheConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        # Small models compute faster than some loads take: what is found is loaded where that is not the question. And
        # engines wait for a daemon that is only slow, as on a busy machine.
        "kv_connector_extra_config": {"address": address, "load": "always", "request_timeout_s": 5.0, **settings},
    }


def offloading_config(
    *tiers: dict[str, Any], rows: int = 40, row: int = 64 << 10, answers: bool = False
) -> dict[str, Any]:
    """vLLM's own offloading, into `rows` of `row` bytes, with these tiers of ours below; `answers`: of these, too.

    What `--kv-transfer-config` would be given, but for the worker, which vLLM has for GPUs only.
    """
    named = [{"type": "TierCacheTier", "module_path": "tiercache.connectors.vllm_tier", **tier} for tier in tiers]
    extra = {
        "spec_name": "MemcpyTieringSpec",
        "spec_module_path": "bench.vllm_native",
        "cpu_bytes_to_use": rows * row,
        "secondary_tiers": named,
        "offload_prompt_only": not answers,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def launch(arena: str = "1GiB", **config: Any) -> LaunchedDaemon:
    """As `tiercache.launch`, with patience."""
    return tiercache.launch(arena, timeout_s=PATIENCE_S, **config)


def launch_patched(run_dir: Path, patch: str, *flags: str) -> LaunchedDaemon:
    """A daemon that runs the code `patch` before anything else. Waits only for its socket."""
    run_dir.mkdir(mode=0o700, exist_ok=True)
    code = f"{patch}\nimport sys\nfrom tiercache.daemon.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "--run-dir", str(run_dir), *flags]
    daemon = LaunchedDaemon(run_dir, False, run_dir / "daemon.log", command)
    wait_until(lambda: daemon.poll() is not None or session_socket_path(run_dir).exists())
    assert daemon.poll() is None, daemon.log.read_text()
    return daemon


def statistics(daemon: LaunchedDaemon) -> dict[str, Any]:
    """The daemon's statistics."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        return client.stats()


def stored_blocks(daemon: LaunchedDaemon) -> int:
    """Blocks that the daemon has, of all namespaces."""
    return int(sum(space["blocks"] for space in statistics(daemon)["namespaces"]))


def flush(daemon: LaunchedDaemon) -> None:
    """Have the daemon forget everything."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        client.flush()


def damage_segments(folder: Path) -> None:
    """Change bytes of every block on a disk of the cache."""
    damaged = 0
    for segment in folder.rglob("*.seg*"):
        with segment.open("r+b") as file:
            for place in range(4096 + 100, segment.stat().st_size, 4096):
                file.seek(place)
                file.write(b"\xff\x00\xff")
                damaged += 1
    assert damaged


def prompt(tokens: int, name: str = "") -> list[int]:
    """Token ids that depend on nothing but the arguments."""
    return [random.Random(f"{name}/{place}").randrange(3, VOCABULARY) for place in range(tokens)]


@functools.cache
def nursery() -> Path:
    """The socket of a process that has imported vLLM, which is most of the work, and forks engines."""
    folder = Path(tempfile.mkdtemp(prefix="engines"))
    command = [sys.executable, str(Path(__file__).with_name("vllm_child.py")), str(folder / "socket")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", (folder / "log").read_text()

    def end() -> None:
        process.kill()
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    return folder / "socket"


class Engine:
    """One engine in a process of its own; see `vllm_child.py` for what it can be asked."""

    def __init__(
        self, model: str, log: Path, address: str = "", settings: dict[str, Any] | None = None, **options: Any
    ):
        self.log = log
        self.offloads = "kv_transfer_config" in options
        arguments = {**ENGINE, "model": model, **options}
        if address:
            arguments["kv_transfer_config"] = transfer_config(address, **(settings or {}))
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(nursery()))
        self._answers, self._orders = self._connection.makefile("r"), self._connection.makefile("w")
        self._send({**arguments, "log": str(log)})
        self.pid = int(self.answer()["pid"])

    def _send(self, fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=self._orders, flush=True)

    def order(self, op: str, **fields: Any) -> None:
        """Send an order, whose answer is fetched with `answer`."""
        self._send({"op": op, **fields})

    def answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, f"the engine has ended:\n{self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.order(op, **fields)
        return self.answer()

    def order_generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields: Any) -> None:
        """Begin to generate; `outputs` waits for it. Further fields as the child has them."""
        self.order("generate", prompts=prompts, max_tokens=max_tokens, **fields)

    def outputs(self) -> tuple[list[list[int]], list[int]]:
        """Tokens and cached prompt tokens of each prompt."""
        answer = self.answer()
        assert set(answer["reasons"]) == {"length"}, answer
        return answer["tokens"], answer["cached"]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields: Any
    ) -> tuple[list[list[int]], list[int]]:
        """Tokens and cached prompt tokens of each prompt, all at once."""
        self.order_generate(prompts, max_tokens, **fields)
        return self.outputs()

    def forget(self) -> None:
        """Leave nothing in vLLM, neither in its pool nor in its own offload memory."""
        assert self.ask("forget")["done"]
        if self.offloads:
            assert self.ask("offloaded")["done"]

    def regenerate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields: Any
    ) -> tuple[list[list[int]], list[int]]:
        """As `generate`, when only the cache can have the prompts."""
        self.forget()
        return self.generate(prompts, max_tokens, **fields)

    def await_hits(self, ids: Sequence[int]) -> None:
        """Ask until all full blocks of a prompt of several blocks are stored and found."""
        wait_until(lambda: self.regenerate([ids], 1)[1] == [len(ids) // BLOCK * BLOCK])

    def counts(self, rank: int = 0) -> dict[str, int]:
        """What the connector of a rank has moved."""
        counters: dict[str, int] = self.ask("count")["counters"][rank]
        return counters

    def lines(self, words: str) -> list[str]:
        """The lines of its log with `words`."""
        return [line for line in self.log.read_text().splitlines() if words in line]

    def close(self) -> None:
        """End it, and see that its books were in order."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            wait_until(self.has_ended, "the end of an engine")
        finally:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            for file in (self._answers, self._orders, self._connection):
                file.close()
        assert not self.lines("failed unexpectedly"), self.log.read_text()[-4000:]

    def has_ended(self) -> bool:
        return waiting.state_of(self.pid) in ("", "Z", "X")
