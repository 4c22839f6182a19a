"""A daemon's HTTP port as a client sees it, and chains to ask for."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from waiting import wait_until

import tiercache
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import ModelCard

BLOCK = 4
BLOCK_BYTES = 64 << 10
TIMEOUT_S = 60.0
SALT = "s3cret"
JSON = {"Content-Type": "application/json"}


class Answer(NamedTuple):
    status: int
    text: str

    @property
    def tree(self) -> dict[str, Any]:
        return dict(json.loads(self.text))

    @property
    def code(self) -> str:
        """Of a failed request."""
        return str(self.tree["error"]["code"])


def request(url: str, body: bytes | None = None) -> Answer:
    """GET, or POST with a body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, JSON), timeout=TIMEOUT_S) as answer:
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def affinity(url: str, **fields: Any) -> Answer:
    return request(f"{url}/v1/affinity", json.dumps(fields).encode())


def connect_socket(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), TIMEOUT_S)


def read_all(sock: socket.socket) -> Answer:
    """The answer, after which the connection is closed. Status 0 where it is cut without one."""
    data = b""
    with suppress(OSError):  # it is reset where not all was read
        while part := sock.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]) if head else 0, body.decode())


def url_in(log: Path, number: int = 1) -> str:
    """Where the `number`-th HTTP process that wrote to this log listens; waits until it does."""

    def found() -> list[str]:
        return re.findall(r"serving (http://\S+) for", log.read_text())

    wait_until(lambda: len(found()) >= number, "the HTTP process listens")
    return found()[number - 1]


@contextmanager
def http_alone(run_dir: Path, listen: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The port without its daemon's help: a child of the test, which ends with it, however that ends."""
    its, ours = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "tiercache.http", str(run_dir), "--listen", listen, "--parent-fd", str(its)]
    try:
        with log.open("wb") as file:
            child = subprocess.Popen(command, stderr=file, pass_fds=[its])
    finally:
        os.close(its)
    try:
        yield child
    finally:
        os.close(ours)
        try:
            child.wait(TIMEOUT_S)
        finally:
            child.kill()


def spec(**fields: Any) -> tiercache.NamespaceSpec:
    form = {"engine": "test/1", "layout": "x", "dtype": "uint8", "block_size": BLOCK, "block_bytes": BLOCK_BYTES}
    return tiercache.NamespaceSpec(**{**form, **fields})


def connect(address: str, namespace: tiercache.NamespaceSpec, blocks: int = 64) -> tiercache.Connector:
    """A connector with a pool of noise."""
    noise = np.random.default_rng(1).integers(0, 256, (blocks, BLOCK_BYTES), np.uint8)
    pool = tiercache.Pool.from_blocks(noise)
    return tiercache.connect(address, namespace=namespace, pool=pool, required=True, request_timeout_s=60.0)


def tokens_of(name: str, blocks: int) -> list[int]:
    """Tokens of a prompt that no other test has."""
    start = sum(map(ord, name)) * 1000
    return list(range(start, start + blocks * BLOCK))


def chain(tokens: list[int], model: str = "weights", salt: str = SALT) -> bytes:
    return tiercache.KeyChain(salted_root(content_id(model), salt), BLOCK, tokens).packed()


def card(*namespaces: tiercache.NamespaceSpec, name: str = "demo", model: str = "weights") -> ModelCard:
    return ModelCard([name], content_id(model), [one.fingerprint() for one in namespaces], BLOCK)


def ask_affinity(client: tiercache.Client, **fields: Any) -> dict[str, Any]:
    """The answer, as soon as the model is known: announcing goes on in the background."""
    query, finder, answers = Query(**{"model": "demo", "salt": SALT, **fields}), Affinity(client), []

    def known() -> bool:
        with suppress(UnknownModel):
            answers.append(finder.ask(query))
        return bool(answers)

    wait_until(known, "the model is announced")
    return dict(answers[0])
