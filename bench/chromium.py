"""A real Chromium without a screen, driven by its chromedriver. WebDriver is HTTP and JSON: no package is needed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

COMMAND_S = 60.0
WAIT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--force-color-profile=srgb",
)

_WORDS = r"document.body.innerText.replace(/\u202f/g, ' ')"


def missing() -> str:
    """What is missing and how to install it; empty when all is there."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(names)}: apt-get install chromium chromium-driver" if names else ""


class BrowserError(Exception):
    """The browser refused a command."""


class Browser:
    """One window. Close it: it is a process, and what it started."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="tiercache-chromium-")
        self._log = Path(self._profile) / "driver.log"
        command = ["chromedriver", "--port=0", f"--log-path={self._log}"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._session = ""
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={self._profile}/profile"]}
            wanted = {
                "goog:chromeOptions": {**options, "perfLoggingPrefs": {"enableNetwork": True}},
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            told = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{told['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise BrowserError("chromedriver did not start")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=COMMAND_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        """Open a page; returns when it and its resources are loaded."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page; returns its result."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport, in CSS pixels."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """A screenshot, as PNG."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """New entries of the log `browser` (the console) or `performance` since the last call."""
        return list(self._ask("POST", f"{self._session}/se/log", {"type": kind}))

    def urls(self) -> list[str]:
        """The network requests since the last call."""
        events = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [str(one["request"]["url"]) for one in sent]

    def wait(self, script: str, what: str) -> Any:
        """Poll until the function body returns something true, and return that."""
        deadline_s = time.monotonic() + WAIT_S
        while not (found := self.run(script)):
            if time.monotonic() > deadline_s:
                raise BrowserError(f"{what}: not within {WAIT_S:g} s")
            time.sleep(0.05)
        return found

    def wait_for_text(self, text: str) -> None:
        """Poll until a text is on the page, with any kind of space."""
        self.wait(f"return {_WORDS}.includes({json.dumps(text)})", text)

    def words(self) -> str:
        """The text of the page, with plain spaces."""
        return str(self.run(f"return {_WORDS}"))

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            if self._session:
                self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=COMMAND_S)
            shutil.rmtree(self._profile, ignore_errors=True)
