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
from http_helpers import TIMEOUT_S, chain, connect, http_alone, request, spec, tokens_of, url_in
from waiting import wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.http import history
from tiercache.http.app import build_app
from tiercache.protocol.messages import ModelCard, ModelList

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing())]

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
        return ModelList(0, 0, self.models, {}, {})


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


def test_before_anything_happened_it_says_so(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    browser.open(url)
    browser.wait(LIVE, "the page is live")
    text = browser.words()
    for words in (
        "Nothing has been looked up",
        "No disk has been used",
        "Not enough data yet",
        "No prefix has been hit yet",
        "No engine has stored anything yet",
        "not configured",
        "Connect an engine",
    ):
        assert words in text
    assert story.tree is not None
    run_dir = story.tree["daemon"]["run_dir"]
    assert f'"kv_connector_extra_config": {{"address": "{run_dir}"}}' in text
    assert f"tiercache serve MODEL_DIR --daemon {run_dir}" in text


def test_a_shared_store_has_a_tile_and_lines_only_where_there_is_one(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    assert story.tree is not None
    shown = """
        const tile = [...document.querySelectorAll('.tile')].find((one) => one.textContent.startsWith('Shared'));
        const all = [...document.querySelectorAll('.legend li')];
        const legends = all.filter((one) => /^Shared|to send/.test(one.textContent));
        return [tile, ...legends].map((one) => one.offsetParent !== null);
    """
    browser.open(url)
    browser.wait(LIVE, "the page is live")
    assert browser.run(shown) == [False] * 5
    figures = {"store": "valkey://kv", "fetched_bytes": 3 << 20, "written_bytes": 1 << 20, "bad_blocks": 2}
    figures |= {"breaker": {"state": "open", "opened": 1, "problem": "refused"}, "write_queue_blocks": 7}
    story.tree = {**story.tree, "tiers": {**story.tree["tiers"], "shared": figures}}
    browser.wait_for_text("3 MiB fetched, 1 MiB sent, 2 bad")
    assert "away" in browser.words()
    assert browser.run(shown) == [True] * 5
    assert "NaN" not in browser.run("return document.body.innerHTML")


def test_models_and_tenants_have_names(browser: Browser, url: str, client: tiercache.Client) -> None:
    card = ModelCard(["Qwen3-8B", "qwen"], bytes(16), [spec().fingerprint()], 16)
    with connect(client.address, spec()) as connector:
        connector.client.announce([card])
        traffic(connector, "named")
        browser.open(url)
        browser.wait_for_text("Qwen3-8B")
        heads, row = (
            browser.run(f"return [...document.querySelectorAll('#namespaces {place} > *')].map((one) => one.innerText)")
            for place in ("thead tr", "tbody tr")
        )
        told = dict(zip(heads, row, strict=True))
        assert (told["Model"], told["Tenant"]) == ("Qwen3-8B", "–")
        assert browser.run("return document.querySelector('#connect').hidden") is True


def test_prefixes_stand_below_each_other_and_sizes_on_a_curve(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    assert story.tree is not None
    place = {"namespace": "f" * 32, "bytes": 1 << 20, "dram_blocks": 3}
    names = [("aaaaaaaa", None, 9.0), ("bbbbbbbb", 0, 5.0), ("cccccccc", None, 4.5), ("dddddddd", 1, 2.0)]
    story.tree["hot_prefixes"] = [
        {**place, "name": name, "parent": parent, "blocks": 4 + number, "tokens": 64, "hits": hits}
        for number, (name, parent, hits) in enumerate(names)
    ]
    curve = [{"capacity_bytes": size << 30, "hit_rate": rate} for size, rate in ((1, 0.2), (4, 0.5), (16, 0.75))]
    story.tree["what_if"] = {
        "sample_rate": 0.01,
        "sampled_blocks": 1000,
        "accessed_blocks": 100_000,
        "window_s": 3600.0,
        "hit_rate": 0.5,
        "curve": curve,
    }
    story.tree["tiers"]["dram"]["capacity_bytes"] = 4 << 30
    browser.open(url)
    browser.wait(LIVE, "the page is live")
    browser.wait_for_text("cccccccc")
    rows = "[...document.querySelectorAll('#prefixes tbody th')]"
    cells = browser.run(f"return {rows}.map((one) => one.innerText.trim())")
    assert [cell.split()[0] for cell in cells] == ["aaaaaaaa", "bbbbbbbb", "dddddddd", "cccccccc"]
    assert "below bbbbbbbb" in cells[2]
    label = browser.run("return document.querySelector('#whatif svg').getAttribute('aria-label')")
    assert label.replace("\u202f", " ").endswith("1 GiB 20 %, 4 GiB 50 %, 16 GiB 75 %")
    assert browser.run("return document.querySelectorAll('#whatif path.series').length") == 1
    assert browser.run("return document.querySelector('#whatif .note.end, #whatif text.note').textContent") == (
        "now 4\u202fGiB"
    )
    assert "Estimated from 1 % of blocks over 1 h" in browser.words()


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


def test_a_page_opened_later_shows_the_past(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    life = request(f"{url}/v1/history").tree["life"]

    def asked_for() -> int:
        assert story.tree is not None
        story.tree["traffic"] = {**story.tree["traffic"], "asked_tokens": story.tree["traffic"]["asked_tokens"] + 10}
        return len(request(f"{url}/v1/history?after=0&life={life}").tree["samples"])

    wait_until(lambda: asked_for() >= 5, "there are five samples")
    browser.open(url)
    browser.wait(LIVE, "the page is live")
    line = browser.run("return document.querySelector('path.series')?.getAttribute('d') ?? ''")
    assert line.count("L") >= 2


# --- how it looks ------------------------------------------------------------------------------

COLORS = """
const seen = (place, property) => getComputedStyle(document.querySelector(place))[property];
const style = getComputedStyle(document.documentElement);
const card = seen('.card', 'backgroundColor');
const line = (name) => { const probe = document.createElement('i'); probe.style.color = style.getPropertyValue(name);
    document.body.append(probe); const color = getComputedStyle(probe).color; probe.remove(); return color; };
return { page: seen('body', 'backgroundColor'), card, ink: seen('h1', 'color'), soft: seen('.note', 'color'),
         pill: [seen('#health', 'color'), seen('#health', 'backgroundColor')],
         lines: ['--dram', '--nvme', '--tail', '--median'].map(line) };
"""


def luminance(color: str) -> float:
    """Of `rgb(r, g, b)`, as WCAG 2 has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_light_and_dark_can_both_be_read(browser: Browser, told: tuple[str, Told]) -> None:
    pages = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(told[0])
        browser.wait(LIVE, "the page is live")
        colors = browser.run(COLORS)
        pages.append(luminance(colors["page"]))
        for text, back in (
            (colors["ink"], colors["card"]),
            (colors["soft"], colors["card"]),
            (colors["soft"], colors["page"]),
            tuple(colors["pill"]),
        ):
            assert contrast(text, back) >= 4.5, (scheme, text, back)
        for line in colors["lines"]:
            assert contrast(line, colors["card"]) >= 3.0, (scheme, line)
    assert pages[0] > 0.8 > 0.05 > pages[1]


@pytest.mark.parametrize("width", [375, 1600])
def test_it_fits_the_screen(browser: Browser, told: tuple[str, Told], width: int) -> None:
    browser.resize(width, 900)
    browser.open(told[0])
    browser.wait(LIVE, "the page is live")
    assert browser.run("return document.documentElement.scrollWidth") == width
    places = "[...document.querySelectorAll('#charts .card')].map((one) => one.offsetLeft)"
    columns = browser.run(f"return new Set({places}).size")
    assert columns == (1 if width == 375 else 3)


def test_many_prefixes_do_not_lengthen_the_page(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    assert story.tree is not None
    story.tree["hot_prefixes"] = [
        {
            "namespace": "f" * 32,
            "name": f"{number:08x}",
            "parent": number - 1 if number else None,
            "blocks": 4,
            "tokens": 64,
            "bytes": 1 << 20,
            "dram_blocks": 3,
            "hits": 100.0 - number,
        }
        for number in range(32)
    ]
    browser.open(url)
    browser.wait_for_text("0000001f")
    bottom = "document.querySelector('footer').getBoundingClientRect().bottom + window.scrollY"
    assert browser.run(f"return document.documentElement.scrollHeight - ({bottom})") <= 32


def test_no_two_marks_of_an_axis_have_the_same_text(browser: Browser, told: tuple[str, Told]) -> None:
    url, _ = told
    browser.open(url)
    browser.wait(LIVE, "the page is live")
    # A made-up history of minutes, in charts as wide as those of a large screen.
    script = """return (async () => {
        const { TimeChart } = await import('/static/chart.js');
        const told = {};
        for (const seconds of [60, 100, 170, 200, 300, 700, 1800]) {
          const figure = document.createElement('figure');
          figure.style.width = '1100px';
          document.body.append(figure);
          const chart = new TimeChart(figure, { title: 'x', series: [], max: 1, format: String, empty: '' });
          chart.update([], 1.7e9, 1.7e9 + seconds);
          told[seconds] = [...figure.querySelector('svg').querySelectorAll('.time')].map((one) => one.textContent);
        }
        return told;
    })()"""
    for seconds, texts in browser.run(script).items():
        assert len(texts) >= 3, seconds
        assert len(set(texts)) == len(texts), (seconds, texts)


def test_the_headline_says_what_its_chart_says(browser: Browser, url: str, client: tiercache.Client) -> None:
    with connect(client.address, spec()) as connector:
        traffic(connector, "headline")
        browser.open(url)
        browser.wait("return /s at worst/.test(document.querySelector('#tiles').innerText)", "a match was timed")
        script = """
            const all = (kind) => [...document.querySelectorAll(kind)];
            const named = (kind, name) => all(kind).find((one) => one.innerText.startsWith(name));
            const tile = named('.tile', 'Lookup p99'), chart = named('#charts figure', 'Lookups');
            return [tile.querySelector('dd').textContent, chart.querySelectorAll('.legend b')[1].textContent];
        """
        headline, legend = browser.run(script)
        assert headline == legend != "–"


def test_a_table_that_goes_on_beyond_the_edge_shows_that(browser: Browser, url: str, client: tiercache.Client) -> None:
    browser.resize(375, 900)
    with connect(client.address, spec()) as connector:
        traffic(connector, "phone")
        browser.open(url)
        browser.wait_for_text(spec().fingerprint()[:8])
        script = "return [at.scrollWidth > at.clientWidth, getComputedStyle(at).backgroundAttachment]"
        beyond, attached = browser.run(f"const at = document.querySelector('#namespaces .scroll'); {script}")
        assert (beyond, attached) == (True, "local, local, scroll, scroll")


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


def test_a_page_opened_without_a_daemon_waits_for_it(browser: Browser, told: tuple[str, Told]) -> None:
    url, story = told
    tree, story.tree = story.tree, None
    wait_until(lambda: not request(f"{url}/v1/history").tree["reachable"], "the port says that the daemon is gone")
    browser.open(url)
    browser.wait("return document.querySelector('#health').textContent === 'Not reachable'", "it says so")
    assert "no daemon answers at /run/x" in browser.words()
    story.tree = tree
    browser.wait(LIVE, "it is there")
