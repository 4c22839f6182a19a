"""The samples behind the page's charts, on a clock that stands still."""

from __future__ import annotations

import json
from itertools import chain, repeat
from typing import Any

import pytest
from waiting import wait_until

from tiercache.errors import DaemonUnavailable
from tiercache.ground.histograms import LatencyHistogram
from tiercache.http import history
from tiercache.http.history import COLUMNS, KEEP_S, MAX_SAMPLES, History, HistoryRecorder


class Told:
    """A daemon's statistics, and a recorder that samples them every two seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.recorder = HistoryRecorder(lambda: self.now_s + 5e8, lambda: self.now_s)
        self.tree: dict[str, Any] = {
            "daemon": {"generation": 1, "run_dir": "/run"},
            "health": {"state": "ok", "reasons": []},
            "tiers": {"dram": {"bytes": 10, "capacity_bytes": 100}},
            "counters": {"requests": 0, "stored_bytes": 0, "evicted_blocks": 0},
            "traffic": {
                "asked_tokens": 0,
                "dram_hit_tokens": 0,
                "below_hit_tokens": 0,
                "shared_hit_tokens": 0,
                "read_bytes": 0,
            },
            "leases": {"parked_requests": 0},
            "histograms": {"request_ns": []},
            "namespaces": [],
            "sessions": [],
        }
        self.match = LatencyHistogram()

    def note(self, seconds: float = 2.0, **grown: int) -> dict[str, float | None]:
        """Time goes by and counters rise; the sample that this makes."""
        self.now_s += seconds
        for name, by in grown.items():
            branch = self.tree["traffic" if name in self.tree["traffic"] else "counters"]
            branch[name] += by
        match = {"labels": {"request": "Match"}, "buckets": self.match.buckets()}
        self.tree["histograms"] = {"request_ns": [match]}
        self.recorder.note(json.loads(json.dumps(self.tree)))
        return dict(zip(COLUMNS, self.told()["samples"][-1][2], strict=True))

    def told(self, after: int = 0, life: str = "") -> dict[str, Any]:
        return dict(json.loads(self.recorder.encode(after, life)))


@pytest.fixture
def told() -> Told:
    return Told()


def test_rates_and_shares_are_of_the_time_between_two_looks(told: Told) -> None:
    assert set(told.note().values()) == {None}, "nothing is known of one moment"
    hits = {"dram_hit_tokens": 200, "below_hit_tokens": 400, "shared_hit_tokens": 100}
    sample = told.note(4.0, asked_tokens=800, stored_bytes=4096, **hits)
    assert (sample["asked_tokens"], sample["hit_dram"]) == (200, 0.25)
    assert (sample["hit_nvme"], sample["hit_shared"]) == (0.375, 0.125)
    assert (sample["dram_in_bytes"], sample["dram_bytes"], sample["nvme_bytes"]) == (1024, 10, 0)
    quiet = told.note()
    assert (quiet["hit_dram"], quiet["asked_tokens"], quiet["match_p99_s"]) == (None, 0, None)


def test_a_silent_daemon_is_a_gap_and_what_it_said_last_stays(told: Told) -> None:
    found = told.told()
    assert (found["reachable"], found["stats"], found["samples"]) == (False, None, [])
    told.note()
    told.note(asked_tokens=2)
    for _ in range(3):
        told.now_s += 2.0
        told.recorder.miss("it is gone")
    found = told.told()
    assert (found["reachable"], found["problem"]) == (False, "it is gone")
    assert found["now_unix_s"] - found["problem_since_unix_s"] == 4.0
    assert found["stats"]["daemon"]["run_dir"] == "/run"
    assert [sample[2] == [None] * len(COLUMNS) for sample in found["samples"]] == [True, False, True]
    assert set(told.note(asked_tokens=2).values()) == {None}, "their time is unknown"
    assert told.told()["reachable"]


def test_half_an_hour_is_kept(told: Told) -> None:
    for _ in range(MAX_SAMPLES + 50):
        told.recorder.note(told.tree)
        told.now_s += 2.0
    assert len(told.told()["samples"]) == MAX_SAMPLES
    for _ in range(20):
        told.note(100.0)
    times = [sample[1] for sample in told.told()["samples"]]
    assert len(times) == 1 + KEEP_S / 100
    assert times[-1] - times[0] <= KEEP_S


def test_lists_have_a_limit_and_counters_of_clients_stay_here(told: Told) -> None:
    space = {"asked_blocks": 1, "blocks": 1, "below_blocks": 0, "engine": "x"}
    told.tree["namespaces"] = [{**space, "id": number, "fingerprint": f"{number:032x}"} for number in range(999)]
    told.tree["models"] = {f"{0:032x}": ["Qwen3-8B"]}
    told.tree["sessions"] = [{"name": str(number), "counters": {"x": 1}} for number in range(200)]
    told.note()
    stats = told.told()["stats"]
    assert (len(stats["namespaces"]), stats["namespace_count"]) == (32, 999)
    assert [one["models"] for one in stats["namespaces"]][:2] == [["Qwen3-8B"], []]
    assert (len(stats["sessions"]), stats["session_count"]) == (history.MAX_SESSIONS, 200)
    assert stats["sessions"][0] == {"name": "0"}
    assert "histograms" not in stats


def test_asking_goes_on_whatever_comes(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(history, "IDLE_S", 0.0)
    monkeypatch.setattr(history, "SLOW_EVERY_S", 1e9)
    gone, asked = DaemonUnavailable("no daemon there"), list[int]()
    answers = chain([{"a tree": "without its figures"}, gone], repeat(told.tree, 5), repeat(gone))

    def ask(hot_prefixes: int) -> dict[str, Any]:
        answer: Any = next(answers)
        asked.append(hot_prefixes)
        if isinstance(answer, Exception):
            raise answer
        return {**answer, **({"hot_prefixes": [{"name": "abcd"}]} if hot_prefixes else {})}

    kept = History(ask, dict)
    kept.start()
    wait_until(lambda: len(asked) >= 8, "the daemon was asked")
    assert asked[:7].count(history.HOT_PREFIXES) == 1, "prefixes are asked for now and then"
    wait_until(lambda: json.loads(kept.encode(0, ""))["problem"] == "no daemon there", "the history says why")
    assert json.loads(kept.encode(0, ""))["stats"]["hot_prefixes"] == [{"name": "abcd"}]
