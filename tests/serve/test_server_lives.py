"""Beginnings and ends of a server: what it refuses to start with, its drain, the death of its daemon."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, RateLimitError
from server_process import ServerProcess
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.engine import LLM, SamplingParams
from tiercache.engine.llm import Generation

pytestmark = pytest.mark.engine
FLAGS = ("--pool-blocks", "640", "--block-size", "8", "--chunk-size", "32")
PROMPT = "It was the best of times, it was the worst of times. " * 3
PATIENT = """
import functools, tiercache
tiercache.connect = functools.partial(tiercache.connect, request_timeout_s=60.0)
"""
"""An engine does without a block when the daemon is silent for half a second, as on a busy machine it may be."""
GREEDY: dict[str, Any] = {"model": "tiny-chat", "temperature": 0, "prompt": PROMPT}


def refuses_connections(server: ServerProcess) -> bool:
    host, port = server.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.stress
def test_sigterm_finishes_what_runs_and_good_blocks_survive(model_dir: Path, tmp_path: Path) -> None:
    nvme = ("--arena", "64MiB", "--nvme", str(tmp_path / "nvme"), "--nvme-size", "2GiB")
    with ServerProcess(model_dir, tmp_path / "first.log", *FLAGS, *nvme, patch=PATIENT) as server:
        stream = iter(server.client.completions.create(**GREEDY, max_tokens=300, n=4, stream=True))
        next(stream)
        server.terminate()
        wait_until(lambda: refuses_connections(server), "no new connections")
        reasons = [part.choices[0].finish_reason for part in stream]
        assert reasons.count("length") == 4
        assert server.wait() == 0, server.log.read_text()
    good = _generate(model_dir, tmp_path / "nvme")
    assert good.cached_tokens == len(PROMPT) // 8 * 8


def _generate(model_dir: Path, nvme: Path) -> Generation:
    """The answer of another process, with the blocks that it finds on the disk."""
    with (
        tiercache.launch("64MiB", nvme=str(nvme), nvme_size="2GiB") as daemon,
        LLM(
            model_dir,
            pool_blocks=64,
            block_size=8,
            chunk_size=32,
            daemon=daemon.address,
            always_load=True,
            load_timeout_s=50,
        ) as llm,
    ):
        [answer] = llm.generate(PROMPT, SamplingParams(max_tokens=20))
        return answer


@pytest.mark.stress
def test_requests_outlive_the_daemon(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    limits = ("--max-num-seqs", "2", "--max-queued-requests", "5", "--api-key", "secret", "--grace", "1")
    with (
        tiercache.launch("64MiB", run_dir=run_dir) as daemon,
        ServerProcess(model_dir, tmp_path / "log", *FLAGS, *limits, "--daemon", str(run_dir)) as server,
    ):
        expected = server.client.completions.create(**GREEDY, max_tokens=300).choices[0].text
        texts: list[str] = []

        def ask() -> None:
            texts.append(server.client.completions.create(**GREEDY, max_tokens=300).choices[0].text)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 2, "requests run")
        os.kill(daemon.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(100)
        assert texts == [expected] * 4
        server.wait_until_idle()
        _check_queue(server)
        _check_deadline(server)


FAILS_IN_THE_END = """
from tiercache.engine.model import HostedModel
forward, calls = HostedModel.forward, []
def failing(*arguments):
    calls.append(1)
    if len(calls) == 100:
        raise MemoryError("no memory for that")
    return forward(*arguments)
HostedModel.forward = failing
"""


@pytest.mark.stress
def test_a_server_whose_engine_fails_says_so_and_ends(model_dir: Path, tmp_path: Path) -> None:
    with ServerProcess(model_dir, tmp_path / "log", *FLAGS, "--no-cache", patch=FAILS_IN_THE_END) as server:
        with pytest.raises(APIError, match="the engine has failed: MemoryError: no memory for that"):
            list(server.client.completions.create(**GREEDY, max_tokens=500, stream=True))
        assert server.wait() == 1
        assert "no memory for that" in server.log.read_text()


def _check_queue(server: ServerProcess) -> None:
    """Two run and five may wait."""
    with server.client.completions.create(**{**GREEDY, "prompt": ["a", "b"]}, max_tokens=900, stream=True) as running:
        next(iter(running))
        wait_until(lambda: server.metric("num_requests_running") == 2, "two run")
        with pytest.raises(RateLimitError, match="5 may: try again later") as caught:
            server.client.completions.create(**{**GREEDY, "prompt": ["c"] * 6})
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
    server.wait_until_idle()


def _check_deadline(server: ServerProcess) -> None:
    """SIGTERM does not wait for a step of several seconds."""
    prompts = {**GREEDY, "prompt": ["a", "b", "c", "d", "e"]}
    with server.client.completions.create(**prompts, max_tokens=1000, stream=True) as stream:
        next(iter(stream))
        server.terminate()
        assert server.wait() == 0, server.log.read_text()
        with pytest.raises(APIError, match="the server is stopping"):
            list(stream)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "PORT"], ["port", "cannot be listened on", "choose another"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid", "choose another"]),
        (["--block-size", "x"], ["--block-size", "x", "serve --help"]),
        (["--blocksize", "8"], ["--blocksize"]),
        (["--max-model-len", "4096", "--no-cache"], ["max_model_len is 4096"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    model_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status = main(["serve", str(model_dir), "--port", "0", *(port if flag == "PORT" else flag for flag in flags)])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert (err.count("\n"), err[:11]) == (1, "tiercache: ")
    assert [word for word in words if word not in err] == []


def test_a_model_that_is_not_there_is_said_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiercache.serve.server", None)
    assert main(["serve", str(tmp_path / "model")]) == 2
    assert "model is not a folder: give that of a Hugging Face model" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "no tokenizer" in capsys.readouterr().err
