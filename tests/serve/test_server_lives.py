"""Beginnings and ends of a server, and its troubles: its drain, a step that hangs, the death of its daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APIError, InternalServerError, RateLimitError
from server_process import POST, ServerProcess
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.engine import LLM, SamplingParams

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
    try:
        server.connect().close()
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
    sizes: dict[str, Any] = {"pool_blocks": 64, "block_size": 8, "chunk_size": 32, "load_timeout_s": 50}
    with (
        tiercache.launch("64MiB", nvme=str(tmp_path / "nvme"), nvme_size="2GiB") as daemon,
        LLM(model_dir, daemon=daemon.address, always_load=True, **sizes) as llm,
    ):
        [answer] = llm.generate(PROMPT, SamplingParams(max_tokens=20))
        assert answer.cached_tokens == len(PROMPT) // 8 * 8, "another process finds the blocks on the disk"


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


# --- a server in trouble: a step that hangs, half a request, connections that stand still ------------


# A pool for one sequence of the longest kind and a little more, so that other requests' blocks do not stay.
SMALL = ("--pool-blocks", "144", "--block-size", "8", "--chunk-size", "32")

# Steps hang while the file is there. Connections are swept often, and the kernel keeps little of what is not read.
HANGS = """
import os, socket, time
from tiercache.engine.model import HostedModel
from tiercache.ground import listening
from tiercache.serve import app, server
forward = HostedModel.forward
def hanging(*arguments):
    while os.path.exists({file!r}):
        time.sleep(0.01)
    return forward(*arguments)
HostedModel.forward = hanging
server.SWEEP_S = 1
app.BODY_TIMEOUT_S = 5.0
bind = listening.bind
def bind_small(*arguments):
    listener = bind(*arguments)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return listener
listening.bind = bind_small
"""


@pytest.mark.stress
def test_a_step_that_hangs_is_said_and_survived(model_dir: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limits = ("--stall-timeout", "6", "--max-num-seqs", "8", "--no-cache")
    patch = HANGS.format(file=str(hangs))
    with ServerProcess(model_dir, tmp_path / "log", *SMALL, *limits, patch=patch) as server:
        expected = server.client.completions.create(**GREEDY, max_tokens=20).choices[0].text
        _check_half_a_head(server)
        _check_unread_body(server)
        _check_unread_answer(server)
        hangs.touch()
        with pytest.raises(InternalServerError, match="the engine has not advanced for") as caught:
            server.client.completions.create(**GREEDY)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_stalled")
        assert caught.value.response.headers["retry-after"] == "10"
        assert server.health() == (503, "engine_stalled")
        with pytest.raises(InternalServerError, match="send the request again later"):
            server.client.completions.create(**GREEDY)
        hangs.unlink()
        wait_until(lambda: server.health() == (200, None), "the engine is healthy again")
        assert server.client.completions.create(**GREEDY, max_tokens=20).choices[0].text == expected
        server.wait_until_idle()
        with server.connect() as connection:
            connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")  # half a body
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert "Traceback" not in server.log.read_text()


def _check_half_a_head(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /v1/comple")
        assert connection.recv(1) == b""


def _check_unread_body(server: ServerProcess) -> None:
    """A body without an end is refused, and the server does not wait for the rest of it."""
    with server.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"200000\r\n" + bytes(1 << 21) + b"\r\n")
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def _check_unread_answer(server: ServerProcess) -> None:
    """A client that reads nothing of its stream does not keep it."""
    # So many that they are not all computed before the connection has stood still for long enough.
    body = json.dumps({**GREEDY, "prompt": ["x"] * 32, "max_tokens": 1000, "logprobs": 20, "stream": True}).encode()
    url = urlsplit(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.metric("request_success_total{abort}"), "the end")
