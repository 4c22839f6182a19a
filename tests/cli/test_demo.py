"""The demo: its conversations, its processes' ends, and (slow) all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console
from waiting import state_of, wait_until

from tiercache.cli.demo import show as demo
from tiercache.demo import chat as demo_chat
from tiercache.demo import child as demo_child
from tiercache.demo import model as demo_model
from tiercache.demo.chat import ChatDemo, ServerProcess
from tiercache.demo.child import Child, ChildFailed
from tiercache.engine.prompts import load_tokenizer
from tiercache.errors import ConfigError, ModelRefused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "tiercache.cli.main", "demo"]
DEADLINE_S = 120.0
PROMPT = 160


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def descendants(pid: int) -> dict[int, str]:
    """Command lines of the processes below `pid`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, level = {}, {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        for child in level:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo_model.SIZES, "tiny", demo_model.Size(64, 96, 2, 1))
        demo_model.build_model(folder, "tiny")
    return folder


def test_sigterm_ends_the_demo_as_ctrl_c_does(tmp_path: Path) -> None:
    """The demo removes what it has made; nothing is left in the folder for temporary files."""
    before = signal.getsignal(signal.SIGTERM)

    def interrupted() -> None:
        with demo.sigterm_like_ctrl_c(), tempfile.TemporaryDirectory(dir=tmp_path):
            assert len(list(tmp_path.iterdir())) == 1
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(DEADLINE_S)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


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
    out = Console(record=True, width=120, quiet=True)
    figures = demo._converse(played, out)
    assert "--chat-template" in played.flags
    assert figures["texts_identical"] is True
    assert figures["tier_tokens"] > 0
    without, having = figures["without_tiers"], figures["with_tiers"]
    assert without["prompt_tokens"] == having["prompt_tokens"]
    assert sum(having["cached_tokens"]) > sum(without["cached_tokens"])
    assert len(without["ttft_s"]) == len(having["ttft_s"]) == 3
    assert min(without["ttft_s"] + having["ttft_s"]) > 0


@pytest.mark.parametrize(("engine", "words"), [("vllm", "pip install '?vllm==0"), ("sglang", "say tiercache or vllm")])
def test_an_engine_that_is_not_there_is_said_in_a_line(
    engine: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "has_vllm", lambda: False)
    with pytest.raises(ConfigError, match=words):
        demo.show(engine=engine, model=None, prompt_file=None, tokens=64, as_json=True)


def test_a_folder_that_is_no_model_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model .*: there is no config\.json"):
        demo.show(engine="tiercache", model=tmp_path, prompt_file=None, tokens=64, as_json=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="no tokenizer"):
        demo.show(engine="tiercache", model=tmp_path, prompt_file=None, tokens=64, as_json=False)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"did not start(.|\n)*is no folder"):
        ServerProcess(demo.SERVER, tmp_path / "log", str(tmp_path / "nowhere"))


def test_a_child_may_finish_at_the_end_and_is_killed_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(
        "import sys, pathlib\nprint('ready', flush=True)\nsys.stdin.read()\npathlib.Path(sys.argv[1]).touch()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with Child("patient", str(tmp_path / "finished")) as child:
            assert child.process.stdout is not None
            assert child.process.stdout.readline() == "ready\n"
        assert child.process.returncode == 0
        assert (tmp_path / "finished").exists()
        child = Child("patient", str(tmp_path / "killed"))
        with pytest.raises(ChildFailed), child:
            raise ChildFailed("something else went wrong")
        assert child.process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_while_a_child_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupted(*arguments: object, **options: object) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), demo_child.none_left():
        Child("json.tool")
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    for pipe in (started[0].stdin, started[0].stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")  # the demo inherits what this process does at SIGINT
@pytest.mark.parametrize("stage", ["tiercache.demo.worker", "tiercache.cli.demo.server"])
def test_an_interrupt_ends_all_processes(stage: str) -> None:
    command = [*COMMAND, "--tokens", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: stage in " ".join(descendants(process.pid).values()), f"{stage} runs", DEADLINE_S)
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (2, 130)  # ours, and that of newer typers
    assert "Traceback" not in err
    wait_until(lambda: not [pid for pid in children if is_alive(pid)], "all have ended", DEADLINE_S)


@pytest.mark.slow
def test_the_whole_demo() -> None:
    done = subprocess.run([*COMMAND, "--tokens", "1024", "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is figures["served"]["texts_identical"] is True
    assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 1008
    assert figures["served"]["tier_tokens"] > 0
