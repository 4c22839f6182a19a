"""Small models of hybrid families, for tests with real vLLM: recurrent states, blocks of two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_engines import Engine, launch, prompt, save_model, wait_until

import tiercache
from tiercache.protocol.messages import SpecList, Specs
from tiercache.protocol.namespaces import NamespaceSpec

__all__ = ["KINDS", "LONG", "Case", "Kind", "flush_kind"]


@dataclass(frozen=True)
class Kind:
    """A family of models: how to make a small one."""

    config: str
    options: dict[str, Any]
    dtype: str = "float32"
    state: bool = True

    def save(self, folder: Path) -> str:
        # Gates multiply what others amplify: with larger weights rounding decides the tokens.
        return save_model(folder, self.config, **{"initializer_range": 0.1, **self.options})


KINDS = {
    "qwen3_next": Kind(
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        dtype="bfloat16",
    ),
    "gemma4": Kind(
        "Gemma4TextConfig",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 100,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
        },
        state=False,
    ),
}
LONG = prompt(700, "hybrid")
"""Longer than a step of most engines here."""


class Case:
    """An engine that lives through daemons at one place, and what it computes without one."""

    def __init__(self, kind: Kind, engine: Engine, run_dir: Path) -> None:
        self.kind, self.engine, self.run_dir = kind, engine, run_dir
        self.unit = int(engine.ask("check")["block_size"])
        """Tokens of a block of the cache: vLLM chooses them, for some models by the kind of CPU."""
        self._right: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def compute(self, *prompts: list[int], tokens: int = 8) -> None:
        """Have the right tokens of these prompts, if they are not known yet. There must be no daemon."""
        for ids in prompts:
            if (tuple(ids), tokens) not in self._right:
                [self._right[tuple(ids), tokens]] = self.engine.regenerate([ids], tokens)[0]

    def right(self, ids: list[int], tokens: int = 8) -> list[int]:
        return self._right[tuple(ids), tokens]

    def cached(self, ids: list[int], tokens: int = 8, *, compare: bool = True) -> int:
        """Ask when only the cache can have a prompt; the tokens must be right. How many it had."""
        [answer], [cached] = self.engine.regenerate([ids], tokens)
        assert not compare or answer == self.right(ids, tokens), (len(ids), cached)
        return cached

    def usable(self, ids: list[int]) -> int:
        """Most tokens of a prompt that can come from the cache."""
        return (len(ids) - self.kind.state) // self.unit * self.unit

    def launch(self, **options: Any) -> tiercache.LaunchedDaemon:
        daemon = launch("64MiB", region="16MiB", run_dir=self.run_dir, **options)
        wait_until(lambda: self.engine.ask("check")["available"])
        return daemon

    def store(self, *prompts: list[int], tokens: int = 8) -> None:
        """Ask until prompts come back as far as they can."""
        for ids in prompts:
            wait_until(lambda ids=ids: self.cached(ids, tokens) == self.usable(ids))


def flush_kind(daemon: tiercache.LaunchedDaemon, state: bool) -> int:
    """Have the daemon forget what is windowed, such as states, or all that is not. How many blocks."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        numbers = [space["id"] for space in client.stats()["namespaces"]]
        found = client.call(Specs, namespaces=numbers)
        assert isinstance(found, SpecList)
        specs = [NamespaceSpec.received(spec) for spec in found.specs.values()]
        return client.flush(namespaces=[spec for spec in specs if bool(spec.window_blocks) == state])
