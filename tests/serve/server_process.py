"""A real `tiercache serve` process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class ServerProcess:
    """Starts the server, and waits until it answers; kills it at the end if it still runs."""

    def __init__(self, model: Path, log: Path, *flags: str, patch: str = "") -> None:
        """`patch` is code that runs before the server does."""
        self.log = log
        start = f"{patch}\nimport sys; from tiercache.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "serve", str(model), "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.url = ""
        wait_until(self._listens, "the server is ready", START_TIMEOUT_S)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=TIMEOUT_S)

    def _listens(self) -> bool:
        text = self.log.read_text()
        assert self.process.poll() is None, text
        if found := re.search(r"is served at (\S+)/v1", text):
            self.url = found[1]
        return bool(self.url)

    def connect(self) -> socket.socket:
        url = urlsplit(self.url)
        return socket.create_connection((url.hostname, url.port), TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """Samples by name; with labels besides the model's, as `name{value,...}`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {}
        for family in families:
            for sample in family.samples:
                labels = ",".join(value for name, value in sample.labels.items() if name != "model_name")
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found

    def metric(self, name: str) -> float:
        return self.metrics()[f"tiercache:{name}"]

    def health(self) -> tuple[int, str | None]:
        """Status and code of `/health`."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=TIMEOUT_S) as answer:
                return answer.status, None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["code"]

    def wait_until_idle(self) -> None:
        """Wait until nothing runs, waits or holds a block."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(map(self.metric, names)), "the server is idle")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
