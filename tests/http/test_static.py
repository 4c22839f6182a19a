"""The page in a real Chromium: what it shows, what it requests, and what it says when no answer comes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from chromium import Browser, missing
from http_helpers import TIMEOUT_S, chain, connect, http_alone, spec, tokens_of, url_in
from waiting import wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.http import history
from tiercache.http.app import build_app
from tiercache.protocol.messages import ModelCard, ModelList

pytestmark = [pytest.mark.stress, pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing())]

LIVE = "return document.body.dataset.state === 'live'"
STALE = "return document.body.dataset.state === 'stale'"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with closing(Browser()) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A fresh browser window. At the end its console must be empty."""
    chromium.open("about:blank")
    chromium.resize(1600, 1200)
    chromium.prefer("light")
    chromium.log("browser"), chromium.urls()
    yield chromium
    chromium.open("about:blank")
    assert chromium.log("browser") == []


class Told:
    """A client whose statistics the test sets; None: the daemon is gone."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree: dict[str, Any] | None = tree
        self.models: list[ModelCard] = []

    def stats(self, **wanted: Any) -> dict[str, Any]:
        if self.tree is None:
            raise DaemonUnavailable("no daemon answers at /run/x")
        return self.tree

    def session(self) -> Told:
        return self

    def call(self, *wanted: Any) -> ModelList:
        return ModelList(0, 0, self.models, {})


@pytest.fixture
def told(chromium: Browser, client: tiercache.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Told]]:
    """The real app on a port, in front of a client whose statistics the test sets."""
    monkeypatch.setattr(history, "SLOW_EVERY_S", 0.0)
    nothing = {"hot_prefixes": [], "namespaces": [], "what_if": {"curve": []}}
    story = Told({**client.stats(histograms=True, hot_prefixes=32), **nothing})
    config = uvicorn.Config(build_app(story, 30.0), lifespan="off", log_level="error")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", story
        chromium.open("about:blank")  # while there is a server: a page still asks for its icon
        server.should_exit = True
        thread.join(TIMEOUT_S)


def traffic(connector: tiercache.Connector, name: str) -> None:
    """Some blocks stored, found and loaded, and some not found."""
    keys = chain(tokens_of(name, 16))
    connector.store(keys, range(16))
    match = connector.match(keys + bytes(16 * 4))
    connector.load(match, range(16, 32))


# --- what it shows -----------------------------------------------------------------------------


def test_charts_and_tables_have_what_happened(browser: Browser, url: str, client: tiercache.Client) -> None:
    with connect(client.address, spec()) as connector:
        browser.open(url)
        browser.wait(LIVE, "the page is live")

        def drawn() -> bool:
            traffic(connector, "drawn")
            return int(browser.run("return document.querySelectorAll('path.series').length")) >= 8

        wait_until(drawn, "lines are drawn")
        browser.wait_for_text(chain(tokens_of("drawn", 16))[-16:].hex()[:8])
        text = browser.words()
        assert "Healthy" in text
        assert "80 %" in text  # 16 of 20 blocks
        assert spec().fingerprint()[:8] in text
        assert "1 MiB" in text
        hit = browser.run("return document.querySelector('#charts svg').getAttribute('aria-label')")
        assert re.fullmatch(r"Hit rate: last DRAM 80\u202f%, NVMe 0\u202f%", hit)
    origins = {url.split("/v1")[0] for url in browser.urls()}
    assert {one.removeprefix(url).split("?")[0] for one in origins if one.startswith("http")} == {
        "/",
        "/static/dashboard.css",
        "/static/dashboard.js",
        "/static/chart.js",
        "/static/format.js",
        "/static/icon.svg",
        "",
    }


def test_what_clients_name_is_text(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    assert story.tree is not None
    evil = "<img src=//elsewhere.example/x onerror=alert(1)><script>document.title='got it'</script>"
    session = {**story.tree["sessions"][0], "name": evil}
    story.tree.update(sessions=[session], health={"state": "degraded", "reasons": [evil], "parts": {}})
    story.tree["daemon"]["run_dir"] = evil
    browser.open(url)
    browser.wait(f"return document.body.innerText.split({json.dumps(evil)}).length === 6", "it is there five times")
    assert browser.run("return document.title") == "tiercache"
    assert all(one.startswith((url, "data:")) for one in browser.urls())


# --- how it looks ------------------------------------------------------------------------------


def test_a_keyboard_is_enough(browser: Browser, told: tuple[str, Told]) -> None:
    browser.open(told[0])
    browser.wait(LIVE, "the page is live")
    browser.wait("return document.querySelectorAll('path.series').length > 0", "there is a line")

    def press(key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            browser.devtools("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def focused() -> str:
        name = "return on.name || on.className.baseVal || on.className"
        return str(browser.run(f"const on = document.activeElement; {name}"))

    reached = []
    for _ in range(4):
        press("Tab")
        reached.append(focused())
    assert reached == ["skip", "range", "plot", "plot"]
    press("ArrowLeft")
    assert browser.run("return document.activeElement.parentElement.querySelector('.tip').hidden") is False
    assert "DRAM" in browser.run("return document.querySelectorAll('[aria-live]')[1].textContent")
    press("Escape")
    assert browser.run("return document.querySelectorAll('.tip:not([hidden])').length") == 0
    unnamed = browser.run(
        "return [...document.querySelectorAll('svg, meter, [role=region], img')]"
        ".filter((one) => !(one.ariaLabel || one.alt === '' || one.ariaHidden)).length"
    )
    assert unnamed == 0


# --- when the port is silent -------------------------------------------------------------------


def test_a_daemon_that_is_killed_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """Then the same of the port itself."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with http_alone(run_dir, "127.0.0.1:0", log) as http:
        with tiercache.launch("8MiB", region="2MiB", run_dir=run_dir) as daemon:
            url = url_in(log)
            with connect(daemon.address, spec()) as connector:
                traffic(connector, "killed")
            browser.open(url)
            browser.wait(LIVE, "the page is live")
            version = browser.run("return document.querySelector('#footer').textContent").partition(", up")[0]
            os.kill(daemon.pid, signal.SIGKILL)
            browser.wait(STALE, "it has seen that")
        alarm = browser.run("return document.querySelector('#alarm').innerText")
        assert re.match(r"Daemon not reachable since \d\d:\d\d:\d\d", alarm)
        assert browser.run("return document.querySelector('#footer').textContent").startswith(version + ", up for")
        assert "Not reachable" in browser.words()
        assert browser.run("return getComputedStyle(document.querySelector('main > section')).opacity") == "0.55"
        with tiercache.launch("8MiB", region="2MiB", run_dir=run_dir):
            browser.wait(LIVE, "it is back")
            assert browser.run("return document.querySelector('#alarm').hidden")
            http.terminate()
            assert http.wait(TIMEOUT_S) == 0
            browser.wait(STALE, "the port is gone")
            assert "does not answer" in browser.run("return document.querySelector('#alarm').innerText")
            with http_alone(run_dir, url.removeprefix("http://"), tmp_path / "log2") as again:
                browser.wait(LIVE, "the port is back")
                again.terminate()
                assert again.wait(TIMEOUT_S) == 0
    browser.open("about:blank")
    refused = [entry for entry in browser.log("browser") if "ERR_CONNECTION_REFUSED" not in entry["message"]]
    assert refused == []  # the browser's own words about the port that was gone
