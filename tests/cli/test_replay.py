"""`tiercache replay` as users run it."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, assert_refused

SAMPLE = Path(__file__).parents[1] / "replay" / "sample.jsonl.gz"
SHORT_REQUESTS = 100
Points = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first requests of the sample, where the figures of the whole of it do not matter."""
    path = tmp_path_factory.mktemp("trace") / "short.jsonl.gz"
    with gzip.open(SAMPLE) as whole, gzip.open(path, "wb", compresslevel=1) as part:
        part.writelines(itertools.islice(whole, SHORT_REQUESTS))
    return path


@pytest.fixture
def points(run: Run) -> Points:
    """The points of a replay of one trace."""

    def one(*arguments: object) -> list[dict[str, Any]]:
        status, out, err = run("replay", *arguments, "--json")
        assert (status, err) == (0, "")
        found: list[dict[str, Any]] = json.loads(out)[0]["points"]
        return found

    return one


def test_more_cache_has_more_hits_and_the_optimum_has_most(points: Points) -> None:
    found = points(SAMPLE, "--dram", "1%,5%,20%", "--nvme", "5x", "--policy", "lru")
    for tier in ("all", "dram"):
        rates = [point["hit_rates"][tier] for point in found]
        assert rates == sorted(rates)
        assert all(point["hit_rates"][tier] <= point["optimum"][tier] + 1e-9 for point in found)
    assert [point["dram_blocks"] for point in found] == [41, 204, 815]
    assert [point["nvme_blocks"] for point in found] == [205, 1020, 4075]
    for point in found:
        assert 0 < point["saved_share"] < 1
        assert 0 < point["ttft_with"]["mean_s"] < point["ttft_without"]["mean_s"]
        assert point["ttft_with"]["p50_s"] <= point["ttft_with"]["p90_s"]
        assert point["nvme_written_bytes"] == point["tallies"]["nvme_written"] * (64 << 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--dram says how large the cache is"),
        (["--dram", "much"], "--dram much: is not a size"),
        (["--dram", "5%", "--nvme", "ax"], "--nvme ax: is not a size"),
        (["--dram", "5%", "--shared", "bx"], "--shared bx: is not a size"),
        (["--dram", "5%", "--hosts", "0"], "--hosts 0: must be 1 to"),
        (["--dram", "5%", "--spread", "random"], "--spread random: must be one of: round-robin, prefix"),
        (["--dram", "5%", "--shared-bandwidth", "fast"], "--shared-bandwidth"),
        (["--dram", "0"], "must be at least one block"),
        (["--dram", "5%", "--policy", "best"], "--policy best: must be one of: lru, hazard"),
        (["--dram", "5%", "--format", "csv"], "--format csv: must be auto"),
        (["--dram", "5%", "--model", "Llama-9"], "Llama-9"),
        (["--dram", "5%", "--model", "LFM2-1.2B"], "states replay does not count"),
        (["--dram", "5%", "--plot", "sizes.gif"], "must end in .png or .svg"),
        (["--dram", "5%", "--plot", "/none/sizes.png"], "its directory does not exist"),
        (["--dram", "5%", "--tflops", "0"], "--tflops 0: must be more than 0"),
        (["--dram", "5%", "--mfu", "2"], "--mfu 2: must be above 0, at most 1"),
        (["--dram", "5%", "--gpu", "50000"], "--gpu-pool 50000"),
        (["--dram", "5%", "--block-bytes", "1GiB"], "at most 256.0 MiB"),
        (["--dram", "5%", "--block-size", "0"], "--block-size 0: must be 1 to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Run, arguments: list[str], words: str) -> None:
    assert_refused(run("replay", SAMPLE, *arguments), words)


def test_what_a_recording_does_not_tell_is_asked_for(run: Run, points: Points, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def record(policy: str) -> None:
        path.write_text(json.dumps({"tiercache_trace": 1, "policy": policy, "arena_bytes": 1 << 30}) + "\n")

    record("lru")
    assert_refused(run("replay", path, "--hosts", "2"), "--hosts 2", "a trace of prompts")
    assert points(path, "--shared", "20x")[0]["shared_bytes"] == 20 << 30
    record("of-a-colleague")
    assert_refused(run("replay", path), f"{path}: recorded with policy of-a-colleague", "--policy hazard")
    (point,) = points(path, "--policy", "hazard")  # it has no requests
    assert (point["policy"], point["requests"]) == ("hazard", 0)


def test_bad_lines_are_told_or_left_out(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}'
    path.write_text(f"{line}\n{line}\n{{\n{line}\n")
    assert_refused(run("replay", path, "--dram", "5%"), f"{path} line 3: is not JSON")
    status, out, err = run("replay", path, "--dram", "100%", "--skip-bad", "--json")
    assert (status, "1 lines skipped" in err) == (0, True)
    (found,) = json.loads(out)
    assert found["bad_lines"] == 1
    assert found["points"][0]["tiers"]["dram"] == {"blocks": 4, "tokens": 2048}
