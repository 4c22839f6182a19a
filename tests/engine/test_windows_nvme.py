"""Models with sliding windows over a real daemon with NVMe: what a killed daemon had written is loaded again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from random_models import SaveModel, prompt_of
from waiting import wait_until

import tiercache
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
SETTINGS = EngineSettings(block_size=8, chunk_size=32, pool_blocks=96)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = prompt_of(150)
LATER = [*PROMPT, *prompt_of(60, seed=1)]


def start(root: Path) -> tiercache.LaunchedDaemon:
    return tiercache.launch(
        arena="64MiB", run_dir=root / "run", nvme=str(root / "nvme"), nvme_size="128MiB", nvme_segment="16MiB"
    )


def nvme_of(daemon: tiercache.LaunchedDaemon) -> dict[str, Any]:
    client = tiercache.Client.connect(daemon.address)
    try:
        stats: dict[str, Any] = client.stats()["tiers"]["nvme"]
        return stats
    finally:
        client.close()


def survives_a_kill(nvme: dict[str, Any], blocks: int) -> bool:
    """Whether so many blocks are on the disk, and have their rows: these are committed a little later."""
    return nvme["blocks"] >= blocks and all(one["database_queue"] == 0 for one in nvme["directories"])


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("MistralConfig", {"sliding_window": 24}),
        ("Gemma2Config", {"sliding_window": 24, "num_hidden_layers": 4, "query_pre_attn_scalar": 16}),
    ],
)
def test_a_window_is_loaded_from_nvme_after_a_kill(
    config: str, changes: dict[str, Any], save_model: SaveModel, tmp_path: Path
) -> None:
    folder = save_model(config, **changes)
    with Engine(folder, SETTINGS) as engine:
        expected = [engine.generate([prompt], GREEDY)[0].tokens for prompt in (PROMPT, LATER)]
    daemon = start(tmp_path)
    try:
        with Engine(folder, SETTINGS, connect_to(daemon.address, required=True)) as engine:
            assert engine.generate([PROMPT], GREEDY)[0].tokens == expected[0]
            assert engine.drain()
            stored = int(engine.stats()["stored"])
        assert stored > 0
        wait_until(lambda: survives_a_kill(nvme_of(daemon), stored), f"{stored} blocks are on NVMe")
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.close()
        assert check_directory(tmp_path / "nvme", sample=ALL, rate=0).findings == []
        daemon = start(tmp_path)
        wait_until(lambda: nvme_of(daemon)["blocks"] >= stored, f"{stored} blocks are on NVMe")
        with Engine(folder, SETTINGS, connect_to(daemon.address, required=True)) as engine:
            outputs = [engine.generate([prompt], GREEDY)[0] for prompt in (PROMPT, LATER)]
            engine.check_integrity()
            loaded = int(engine.stats()["loaded"])
        assert [output.tokens for output in outputs] == expected
        assert outputs[0].external_hit_tokens == 144
        assert 0 < nvme_of(daemon)["promoted_blocks"] <= loaded < stored, "what lies before the window stays there"
    finally:
        daemon.close()
    assert check_directory(tmp_path / "nvme", sample=ALL, rate=0).findings == []
