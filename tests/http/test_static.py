"""The page in a real Chromium: what it shows, what it requests, and what it says when no answer comes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser, missing
from http_helpers import BLOCK_BYTES, TIMEOUT_S, card, chain, connect, http_alone, spec, tokens_of, url_in
from waiting import wait_until

import tiercache

pytestmark = [pytest.mark.stress, pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing())]

LIVE = "return document.body.dataset.state === 'live'"
STALE = "return document.body.dataset.state === 'stale'"
EVIL = "<img src=//elsewhere.example/x onerror=alert(1)><script>document.title='got it'</script>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with closing(Browser()) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A fresh browser window. At the end its console must be empty."""
    chromium.open("about:blank")
    chromium.resize(1600, 1200)
    chromium.log("browser"), chromium.urls()
    yield chromium
    chromium.open("about:blank")
    assert chromium.log("browser") == []


def traffic(connector: tiercache.Connector, name: str) -> None:
    """Some blocks stored, found and loaded, and some not found."""
    keys = chain(tokens_of(name, 16))
    connector.store(keys, range(16))
    match = connector.match(keys + bytes(16 * 4))
    connector.load(match, range(16, 32))


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


def test_what_clients_name_is_text(browser: Browser, url: str, client: tiercache.Client) -> None:
    pool = tiercache.Pool.from_blocks(np.zeros((32, BLOCK_BYTES), np.uint8))
    with tiercache.connect(
        client.address, namespace=spec(), pool=pool, name=EVIL[:64], required=True, request_timeout_s=60.0
    ) as connector:
        connector.announce([card(spec(), name=EVIL)])
        traffic(connector, "evil")
        browser.open(url)
        browser.wait_for_text(EVIL)
        browser.wait_for_text(EVIL[:64])
        assert browser.run("return document.title") == "tiercache"
        assert all(one.startswith((url, "data:", "about:")) for one in browser.urls())


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
