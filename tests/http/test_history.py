"""The samples behind the page's charts, on a clock that stands still."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest
from http_helpers import chain, connect, request, spec, tokens_of
from waiting import wait_until

import tiercache
from tiercache.errors import DaemonUnavailable
from tiercache.ground.histograms import LatencyHistogram
from tiercache.http import history
from tiercache.http.history import COLUMNS, KEEP_S, MAX_SAMPLES, History, HistoryRecorder


class Daemon:
    """A daemon's statistics, and a recorder that samples them every two seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.recorder = HistoryRecorder(lambda: self.now_s + 5e8, lambda: self.now_s)
        self.tree: dict[str, Any] = {
            "daemon": {"generation": 1, "run_dir": "/run"},
            "health": {"state": "ok", "reasons": []},
            "tiers": {"dram": {"bytes": 10, "capacity_bytes": 100}},
            "counters": {"requests": 0, "stored_bytes": 0, "evicted_blocks": 0},
            "traffic": {"asked_tokens": 0, "dram_hit_tokens": 0, "below_hit_tokens": 0, "read_bytes": 0},
            "leases": {"parked_requests": 0},
            "histograms": {"request_ns": []},
            "namespaces": [],
            "sessions": [],
        }
        self.match = LatencyHistogram()

    def note(self, seconds: float, **grown: int) -> None:
        """Let time go by and counters rise."""
        self.now_s += seconds
        for name, by in grown.items():
            branch = self.tree["traffic" if name in self.tree["traffic"] else "counters"]
            branch[name] += by
        match = {"labels": {"request": "Match"}, "buckets": self.match.buckets()}
        self.tree["histograms"] = {"request_ns": [match]}
        self.recorder.note(json.loads(json.dumps(self.tree)))

    def tell(self, seconds: float = 2.0, **grown: int) -> dict[str, float | None]:
        """The same; the sample that this makes."""
        self.note(seconds, **grown)
        return self.newest()

    def told(self, after: int = 0, life: str = "") -> dict[str, Any]:
        return dict(json.loads(self.recorder.encode(after, life)))

    def newest(self) -> dict[str, float | None]:
        return dict(zip(COLUMNS, self.told()["samples"][-1][2], strict=True))


@pytest.fixture
def daemon_told() -> Daemon:
    return Daemon()


def test_rates_and_shares_are_of_the_time_between_two_looks(daemon_told: Daemon) -> None:
    assert set(daemon_told.tell().values()) == {None}  # nothing is known of one moment
    sample = daemon_told.tell(4.0, asked_tokens=800, dram_hit_tokens=200, below_hit_tokens=400, stored_bytes=4096)
    assert (sample["asked_tokens"], sample["hit_dram"], sample["hit_nvme"]) == (200, 0.25, 0.5)
    assert (sample["dram_in_bytes"], sample["dram_bytes"], sample["nvme_bytes"]) == (1024, 10, 0)
    quiet = daemon_told.tell()
    assert (quiet["hit_dram"], quiet["asked_tokens"], quiet["match_p99_s"]) == (None, 0, None)


def test_percentiles_are_of_the_time_between_two_looks(daemon_told: Daemon) -> None:
    daemon_told.match.observe(5_000_000_000)
    daemon_told.tell()
    for ns in (1_000_000, 1_000_000, 2_000_000):
        daemon_told.match.observe(ns)
    sample = daemon_told.tell()
    assert (sample["match_p50_s"], sample["match_p99_s"]) == (0.001, 0.002)


def test_a_daemon_that_was_restarted_begins_anew(daemon_told: Daemon) -> None:
    daemon_told.tell()
    daemon_told.tell(asked_tokens=1000)
    daemon_told.tree["daemon"]["generation"] = 2
    daemon_told.tree["traffic"]["asked_tokens"] = 0
    assert set(daemon_told.tell().values()) == {None}
    assert daemon_told.tell(asked_tokens=10)["asked_tokens"] == 5


def test_a_silent_daemon_is_a_gap_and_what_it_said_last_stays(daemon_told: Daemon) -> None:
    told = daemon_told.told()
    assert (told["reachable"], told["stats"], told["samples"]) == (False, None, [])
    daemon_told.tell()
    daemon_told.tell(asked_tokens=2)
    for _ in range(3):
        daemon_told.now_s += 2.0
        daemon_told.recorder.miss("it is gone")
    told = daemon_told.told()
    assert (told["reachable"], told["problem"]) == (False, "it is gone")
    assert told["now_unix_s"] - told["problem_since_unix_s"] == 4.0
    assert told["stats"]["daemon"]["run_dir"] == "/run"
    assert [sample[2] == [None] * len(COLUMNS) for sample in told["samples"]] == [True, False, True]
    assert set(daemon_told.tell(asked_tokens=2).values()) == {None}  # its time is unknown
    assert daemon_told.told()["reachable"]


def test_a_page_gets_what_it_does_not_have(daemon_told: Daemon) -> None:
    for _ in range(5):
        daemon_told.tell()
    told = daemon_told.told()
    life, numbers = told["life"], [sample[0] for sample in told["samples"]]
    assert numbers == [1, 2, 3, 4, 5]
    assert [sample[0] for sample in daemon_told.told(3, life)["samples"]] == [4, 5]
    assert len(daemon_told.told(3, "another life")["samples"]) == 5
    assert daemon_told.told(99, life)["samples"] == []


def test_half_an_hour_is_kept(daemon_told: Daemon) -> None:
    for _ in range(MAX_SAMPLES + 50):
        daemon_told.note(2.0)
    assert len(daemon_told.told()["samples"]) == MAX_SAMPLES
    for _ in range(20):
        daemon_told.note(100.0)
    times = [sample[1] for sample in daemon_told.told()["samples"]]
    assert len(times) == 1 + KEEP_S / 100
    assert times[-1] - times[0] <= KEEP_S


def test_lists_have_a_limit_and_counters_of_clients_stay_here(daemon_told: Daemon) -> None:
    space = {"asked_blocks": 1, "blocks": 1, "below_blocks": 0, "engine": "x"}
    daemon_told.tree["namespaces"] = [{**space, "id": number, "fingerprint": f"{number:032x}"} for number in range(999)]
    daemon_told.tree["models"] = {f"{0:032x}": ["Qwen3-8B"]}
    daemon_told.tree["sessions"] = [{"name": str(number), "counters": {"x": 1}} for number in range(200)]
    daemon_told.tell()
    stats = daemon_told.told()["stats"]
    assert (len(stats["namespaces"]), stats["namespace_count"]) == (32, 999)
    assert [one["models"] for one in stats["namespaces"]][:2] == [["Qwen3-8B"], []]
    assert (len(stats["sessions"]), stats["session_count"]) == (history.MAX_SESSIONS, 200)
    assert stats["sessions"][0] == {"name": "0"}
    assert "histograms" not in stats


class Asked:
    """Answers in turn, and says when each was asked for."""

    def __init__(self, answers: Iterator[dict[str, Any]]) -> None:
        self.count = 0
        self.changed = threading.Condition()
        self._answers = answers

    def __call__(self, hot_prefixes: int) -> dict[str, Any]:
        with self.changed:
            self.count += 1
            self.changed.notify_all()
        return next(self._answers)

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, 30.0)


def test_asking_goes_on_whatever_comes(monkeypatch: pytest.MonkeyPatch, daemon_told: Daemon) -> None:
    monkeypatch.setattr(history, "IDLE_S", 0.0)

    def answers() -> Iterator[dict[str, Any]]:
        yield {"a tree": "of another release"}
        yield from repeat(daemon_told.tree)

    asked = Asked(answers())
    kept = History(asked, dict)
    kept.start()
    asked.wait(3)
    wait_until(lambda: json.loads(kept.encode(0, ""))["reachable"], "the answer is recorded")


def test_an_opened_page_gets_news_soon(daemon_told: Daemon) -> None:
    """The thread sleeps for ten seconds while no page is open; opening one wakes it."""
    asked = Asked(repeat(daemon_told.tree))
    kept = History(asked, dict)
    kept.start()
    asked.wait(1)
    kept.encode(0, "")
    asked.wait(2)


def test_prefixes_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch, daemon_told: Daemon) -> None:
    monkeypatch.setattr(history, "IDLE_S", 0.0)
    asked: list[int] = []

    def ask(hot_prefixes: int) -> dict[str, Any]:
        asked.append(hot_prefixes)
        return {**daemon_told.tree, **({"hot_prefixes": [{"name": "abcd"}]} if hot_prefixes else {})}

    kept = History(ask, dict)
    kept.start()
    wait_until(lambda: len(asked) >= 5, "the daemon was asked five times")
    assert asked[:5] == [history.HOT_PREFIXES, 0, 0, 0, 0]
    assert json.loads(kept.encode(0, ""))["stats"]["hot_prefixes"] == [{"name": "abcd"}]


def test_the_client_down_is_a_miss(daemon_told: Daemon) -> None:
    def down(hot_prefixes: int) -> dict[str, Any]:
        raise DaemonUnavailable("no daemon there")

    kept = History(down, dict)
    kept.start()
    wait_until(lambda: json.loads(kept.encode(0, ""))["problem"] == "no daemon there", "the history says why")


def test_over_http_it_is_what_happened(url: str, client: tiercache.Client) -> None:
    life = request(f"{url}/v1/history").tree["life"]
    with connect(client.address, spec()) as connector:
        keys = chain(tokens_of("history", 8))
        connector.store(keys, range(8))

        def seen() -> bool:
            connector.release(connector.match(keys + bytes(16 * 8)))
            told = request(f"{url}/v1/history?after=0&life={life}").tree
            shares = [dict(zip(told["columns"], sample[2], strict=True))["hit_dram"] for sample in told["samples"]]
            return 0.5 in shares

        wait_until(seen, "a sample in which DRAM had half of the tokens")
    assert request(f"{url}/v1/history?after=x").code == "bad_query"
    assert request(f"{url}/v1/history?after={'9' * 5000}").code == "bad_query"
