"""A server in trouble: a step that hangs, half a request, connections that stand still."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import InternalServerError
from server_process import TIMEOUT_S, ServerProcess
from waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.stress]
# A pool for one sequence of the longest kind and a little more, so that other requests' blocks do not stay.
FLAGS = ("--pool-blocks", "144", "--block-size", "8", "--chunk-size", "32")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PROMPT = "It was the best of times, it was the worst of times. " * 4
GREEDY: dict[str, Any] = {"model": "tiny-chat", "temperature": 0}

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


def test_a_step_that_hangs_is_said_and_survived(model_dir: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limits = ("--stall-timeout", "6", "--max-num-seqs", "8", "--no-cache")
    patch = HANGS.format(file=str(hangs))
    with ServerProcess(model_dir, tmp_path / "log", *FLAGS, *limits, patch=patch) as server:
        expected = server.client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20).choices[0].text
        _check_half_a_head(server)
        _check_unread_body(server)
        _check_unread_answer(server)
        hangs.touch()
        with pytest.raises(InternalServerError, match="the engine has not advanced for") as caught:
            server.client.completions.create(**GREEDY, prompt=PROMPT)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_stalled")
        assert caught.value.response.headers["retry-after"] == "10"
        assert server.health() == (503, "engine_stalled")
        with pytest.raises(InternalServerError, match="send the request again later"):
            server.client.completions.create(**GREEDY, prompt=PROMPT)
        hangs.unlink()
        wait_until(lambda: server.health() == (200, None), "the engine is healthy again")
        assert server.client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20).choices[0].text == expected
        server.wait_until_idle()
        with _half_a_body(server) as connection:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert "Traceback" not in server.log.read_text()


def _connect(server: ServerProcess) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), TIMEOUT_S)


def _check_half_a_head(server: ServerProcess) -> None:
    with _connect(server) as connection:
        connection.sendall(b"POST /v1/comple")
        assert connection.recv(1) == b""


def _half_a_body(server: ServerProcess) -> socket.socket:
    connection = _connect(server)
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    return connection


def _check_unread_body(server: ServerProcess) -> None:
    """A body without an end is refused, and the server does not wait for the rest of it."""
    with _connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
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
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("request_success_total{abort}"), "the end")
