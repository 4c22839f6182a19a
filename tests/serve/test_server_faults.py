"""A server in trouble: a step that hangs, a crowd, half a request, connections that stand still."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, NamedTuple
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
from tiercache.serve import bodies, server
forward = HostedModel.forward
def hanging(*arguments):
    while os.path.exists({file!r}):
        time.sleep(0.01)
    return forward(*arguments)
HostedModel.forward = hanging
server.SWEEP_S = 1
bodies.BODY_TIMEOUT_S = 5.0
bind = listening.bind
def bind_small(*arguments):
    listener = bind(*arguments)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return listener
listening.bind = bind_small
"""


class Answer(NamedTuple):
    status: int
    headers: str
    body: str


class RawClient:
    """One request over a connection of its own, without a library that makes it better than it is."""

    def __init__(self, server: ServerProcess) -> None:
        url = urlsplit(server.url)
        self._address = (url.hostname, url.port)

    async def send(
        self, body: dict[str, Any], receive_bytes: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """With `receive_bytes` the kernel keeps no more than about that, and we read no more than that."""
        data = json.dumps(body).encode()
        head = HEAD + f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        # Neither blocks, and a connection without a request would be swept away.
        connection.connect(self._address)
        connection.sendall(head + data)
        return await asyncio.open_connection(sock=connection, limit=receive_bytes or 1 << 16)

    async def ask(self, body: dict[str, Any]) -> Answer:
        reader, writer = await self.send(body)
        head, _, text = (await asyncio.wait_for(reader.read(), TIMEOUT_S)).decode().partition("\r\n\r\n")
        writer.close()
        return Answer(int(head.split()[1]), head.lower(), text)


def test_a_step_that_hangs_is_said_and_survived(model_dir: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limits = ("--stall-timeout", "6", "--max-queued-requests", "300", "--max-num-seqs", "8", "--no-cache")
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
            _check_crowd(server)
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
    client = RawClient(server)
    body = {**GREEDY, "prompt": ["x"] * 32, "max_tokens": 1000, "logprobs": 20, "stream": True}

    async def wait_for_the_end() -> None:
        _, writer = await client.send(body, receive_bytes=4096)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, lambda: server.metric("request_success_total{abort}"), "the end")
        writer.close()

    asyncio.run(wait_for_the_end())


def _check_crowd(server: ServerProcess) -> None:
    """Of a thousand requests at once some are served and the others refused; fifty that hang up leave nothing."""
    texts = [
        server.client.completions.create(**GREEDY, prompt=str(number), max_tokens=4).choices[0].text
        for number in range(5)
    ]
    before_bytes = server.rss_bytes()
    client = RawClient(server)

    async def leave() -> None:
        _, writer = await client.send({**GREEDY, "prompt": PROMPT, "max_tokens": 700})
        writer.close()

    async def come() -> list[Answer]:
        leaving = [leave() for _ in range(50)]
        asking = [client.ask({**GREEDY, "prompt": str(number % 5), "max_tokens": 4}) for number in range(950)]
        return (await asyncio.gather(*leaving, *asking))[50:]

    answers = asyncio.run(come())
    served = [(number, json.loads(answer.body)) for number, answer in enumerate(answers) if answer.status == 200]
    assert [body["choices"][0]["text"] for _, body in served] == [texts[number % 5] for number, _ in served]
    refused = [answer for answer in answers if answer.status != 200]
    assert {answer.status for answer in refused} <= {429}
    assert all("retry-after: 1\r\n" in answer.headers and "try again later" in answer.body for answer in refused)
    assert len(served) >= 250
    server.wait_until_idle()
    assert server.metric("request_success_total{abort}") > 0
    assert server.rss_bytes() - before_bytes < 128 << 20
