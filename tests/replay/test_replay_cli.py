"""`tiercache replay` as users run it."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercache.cli import replay as command
from tiercache.cli.main import main
from tiercache.ground.extras import install_extra
from tiercache.plan.model import load_model
from tiercache.replay.estimate import Costs, Estimate
from tiercache.replay.requests import TraceRequest, chain_keys
from tiercache.replay.simulation import Outcome

SAMPLE = Path(__file__).with_name("sample.jsonl.gz")
SHORT_REQUESTS = 150


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first quarter of the sample, where the figures of the whole of it do not matter."""
    path = tmp_path_factory.mktemp("trace") / "short.jsonl.gz"
    with gzip.open(SAMPLE) as whole, gzip.open(path, "wb", compresslevel=1) as part:
        part.writelines(itertools.islice(whole, SHORT_REQUESTS))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["replay", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def points(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)[0]["points"]
    return found


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    status, out, err = run(capsys, short, "--dram", "2%,10%", "--nvme", "5x")
    assert (status, err) == (0, "")
    assert "blocks of 512 tokens, 64.0 MiB" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("2%", "10%"))]
    assert [row[0] for row in rows] == ["2%", "10%"]
    dram, nvme, both, best_dram, best = (float(cell.rstrip("%")) for cell in rows[0][4:9])
    assert both == pytest.approx(dram + nvme, abs=0.11)
    assert 0 < dram < best_dram
    assert both < best < 100
    assert "Llama-3.1-8B" in out


def test_more_cache_has_more_hits_and_the_optimum_has_most(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(capsys, SAMPLE, "--dram", "1%,5%,20%", "--nvme", "5x", "--policy", "lru")
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


def test_policies_are_compared_in_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, short: Path) -> None:
    arguments = ["--dram", "2%,5%", "--nvme", "5x"]
    both = points(capsys, short, *arguments, "--policy", "lru, hazard,lru")
    assert [(point["dram"], point["policy"]) for point in both] == [
        ("2%", "lru"),
        ("2%", "hazard"),
        ("5%", "lru"),
        ("5%", "hazard"),
    ]
    alone = points(capsys, short, *arguments, "--policy", "lru")
    for name in ("hit_rates", "tallies", "optimum"):
        assert [point[name] for point in both[0::2]] == [point[name] for point in alone]
    assert both[1]["optimum"] == both[0]["optimum"] != both[2]["optimum"]
    pytest.importorskip("matplotlib")
    picture = tmp_path / "policies.svg"
    status, out, _ = run(capsys, short, *arguments, "--policy", "lru,hazard", "--plot", picture)
    rows = [line.split()[4] for line in out.splitlines() if line.startswith(("2%", "5%"))]
    assert (status, rows) == (0, ["lru", "hazard"] * 2)
    assert "policy lru and hazard" in out


def test_plan_and_replay_reckon_with_the_same_machine(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    quick = points(capsys, short, "--dram", "5%", "--gpu", "H200")[0]
    slow = points(capsys, short, "--dram", "5%", "--gpu", "L4")[0]
    slower = points(capsys, short, "--dram", "5%", "--gpu", "L4", "--mfu", "0.25")[0]
    assert quick["ttft_without"]["mean_s"] < slow["ttft_without"]["mean_s"]
    assert slower["ttft_without"]["mean_s"] == pytest.approx(2 * slow["ttft_without"]["mean_s"], rel=0.05)


def test_sizes_in_blocks_bytes_and_shares_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(capsys, SAMPLE, "--dram", "5%,204,12.75GiB", "--no-optimum")
    assert [point["dram_blocks"] for point in found] == [204, 204, 204]
    assert len({point["hit_rates"]["all"] for point in found}) == 1
    assert found[0]["optimum"] == {"dram": None, "all": None}


def test_the_whole_of_the_daemon_agrees_with_the_quick_way(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    quick, exact = (points(capsys, short, "--dram", "2%", "--nvme", "5x", *more)[0] for more in ([], ["--exact"]))
    for name in ("hit_rates", "tallies", "tiers"):
        assert quick[name] == exact[name]


def test_a_gpu_pool_in_front(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    without, with_pool = (points(capsys, short, "--dram", "5%", *more)[0] for more in ([], ["--gpu-pool", "100"]))
    assert set(with_pool["hit_rates"]) == {"gpu", "dram", "all"}
    assert with_pool["hit_rates"]["gpu"] > 0
    assert with_pool["hit_rates"]["all"] >= without["hit_rates"]["all"]
    assert with_pool["ttft_without"]["mean_s"] < without["ttft_without"]["mean_s"]


def test_hosts_that_share_a_store(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    arguments = ["--dram", "5%", "--nvme", "2x", "--hosts", "2"]
    apart = points(capsys, short, *arguments)[0]
    found = points(capsys, short, *arguments, "--shared", "20x", "--spread", "round-robin")[0]
    rates = found["hit_rates"]
    assert set(rates) == {"dram", "nvme", "shared", "all"}
    assert rates["all"] == pytest.approx(rates["dram"] + rates["nvme"] + rates["shared"])
    assert apart["hit_rates"]["all"] < rates["all"] <= found["optimum"]["all"]
    assert 0 < found["others_share"] < 1
    assert (found["hosts"], found["spread"]) == (2, "round-robin")
    assert found["shared_blocks"] == pytest.approx(20 * found["dram_blocks"], abs=1)
    network = ["--shared-bandwidth", "1Gbit/s", "--shared-round-trip", "2ms"]
    status, out, _ = run(capsys, short, *arguments, "--shared", "20x", *network)
    assert status == 0
    for words in ("2 hosts by round-robin", "hit shared", "of others", "0.125 GB/s with round trips of 2.0 ms"):
        assert words in out
    [row] = [line.split() for line in out.splitlines() if line.startswith("5%")]
    dram, nvme, shared, every, others = (float(cell.rstrip("%")) for cell in row[4:9])
    assert every == pytest.approx(dram + nvme + shared, abs=0.16)
    assert others == pytest.approx(100 * found["others_share"], abs=0.06)


def test_a_picture_of_a_shared_store(capsys: pytest.CaptureFixture[str], tmp_path: Path, short: Path) -> None:
    pytest.importorskip("matplotlib")
    few, picture = tmp_path / "few.jsonl.gz", tmp_path / "shared.svg"
    with gzip.open(short) as whole, gzip.open(few, "wb") as part:
        part.writelines(itertools.islice(whole, 30))
    assert run(capsys, few, "--dram", "5%", "--shared", "20x", "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_recording_tells_of_one_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"tiercache_trace": 1, "policy": "lru", "arena_bytes": 1 << 30}) + "\n")
    status, out, err = run(capsys, path, "--hosts", "2")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--hosts 2" in err
    assert "a trace of prompts" in err
    (point,) = points(capsys, path, "--shared", "20x")
    assert point["shared_bytes"] == 20 << 30


def test_a_write_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    free, tight = (
        points(capsys, SAMPLE, "--dram", "2%", "--nvme", "5x", "--write-budget", budget)[0] for budget in ("0", "1TiB")
    )
    assert 0 < tight["nvme_written_bytes"] < free["nvme_written_bytes"]
    # Two hours' worth of the day's budget, and what the five minutes of the trace add.
    assert tight["nvme_written_bytes"] <= (1 << 40) * (7200 + 300) / 86400 + (64 << 20)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, short: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sizes.{kind}"
    status, out, _ = run(capsys, short, "--dram", "1%,5%", "--nvme", "5x", "--plot", path)
    assert status == 0
    assert f"The picture is in {path}" in out
    head = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert path.read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--dram says how large the cache is"),
        (["--dram", "much"], "--dram much: is no size"),
        (["--dram", "5%", "--nvme", "ax"], "--nvme ax: is no size"),
        (["--dram", "5%", "--shared", "bx"], "--shared bx: is no size"),
        (["--dram", "5%", "--hosts", "0"], "--hosts 0: must be 1 to"),
        (["--dram", "5%", "--spread", "random"], "--spread random: must be one of: round-robin, prefix"),
        (["--dram", "5%", "--shared-bandwidth", "fast"], "--shared-bandwidth"),
        (["--dram", "0"], "must be at least one block"),
        (["--dram", "5%", "--policy", "best"], "--policy best: must be one of: lru, hazard"),
        (["--dram", "5%", "--policy", "arc"], "--policy arc: must be one of: lru, hazard"),
        (["--dram", "5%", "--format", "csv"], "--format csv: must be auto"),
        (["--dram", "5%", "--model", "Llama-9"], "Llama-9"),
        (["--dram", "5%", "--model", "LFM2-1.2B"], "states replay does not count"),
        (["--dram", "5%", "--plot", "sizes.gif"], "must end in .png or .svg"),
        (["--dram", "5%", "--plot", "/none/sizes.png"], "its directory does not exist"),
        (["--dram", "5%", "--tflops", "0"], "--tflops 0: must be more than 0"),
        (["--dram", "5%", "--mfu", "2"], "--mfu 2: must be above 0, at most 1"),
        (["--dram", "5%", "--gpu", "50000"], "--gpu-pool 50000"),
        (["--dram", "5%", "--prefill-flops", "1e14"], "(Possible options: --tflops): say --tflops, and --mfu"),
        (["--dram", "5%", "--block-bytes", "1GiB"], "at most 256.0 MiB"),
        (["--dram", "5%", "--block-size", "0"], "--block-size 0: must be 1 to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, out, err = run(capsys, SAMPLE, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_recording_with_a_policy_of_an_earlier_release_is_replayed_with_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps({"tiercache_trace": 1, "policy": "arc", "arena_bytes": 1 << 30}) + "\n")
    status, out, err = run(capsys, path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{path}: recorded with policy arc" in err
    assert "--policy hazard" in err
    (point,) = points(capsys, path, "--policy", "hazard")  # it has no requests
    assert (point["policy"], point["requests"]) == ("hazard", 0)


def test_bad_lines_are_told_or_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}'
    path.write_text(f"{line}\n{line}\n{{\n{line}\n")
    status, out, err = run(capsys, path, "--dram", "5%")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{path} line 3: is no JSON" in err
    status, out, err = run(capsys, path, "--dram", "100%", "--skip-bad", "--json")
    assert status == 0
    assert "1 lines skipped" in err
    (found,) = json.loads(out)
    assert found["bad_lines"] == 1
    assert found["points"][0]["tiers"]["dram"] == {"blocks": 4, "tokens": 2048}


def test_a_picture_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, SAMPLE, "--dram", "5%", "--plot", "sizes.png")
    assert (status, err) == (2, f"tiercache: --plot needs matplotlib: {install_extra('plot')}\n")


def test_progress_is_told_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    monkeypatch.setattr(command, "TELL_EVERY_S", 0.0)
    assert run(capsys, short, "--dram", "5%")[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = run(capsys, short, "--dram", "5%")
    told = re.findall(r"\rshort.jsonl.gz: ([^\r]+): (\d+)%", err)
    assert status == 0
    assert {what for what, _ in told} == {"first pass, for the optimum", "5%, hazard", "5%: the optimum"}
    assert err.endswith("\r\x1b[K")
    assert "\r" not in out


def test_several_traces_are_played_apart(capsys: pytest.CaptureFixture[str], short: Path) -> None:
    status, out, _ = run(capsys, short, short, "--dram", "5%", "--json")
    first, second = json.loads(out)
    assert status == 0
    assert first["points"][0]["hit_rates"] == second["points"][0]["hit_rates"]


def test_work_and_times_of_one_prompt() -> None:
    model = load_model("Llama-3.1-8B")
    estimate = Estimate(Costs(model, flops_per_s=1e15, dram_bytes_per_s=1e10, nvme_bytes_per_s=1e9))
    prompt = TraceRequest(0.0, chain_keys(range(8)), 8 * 512)
    for tokens in (1, 600, 4096):
        assert estimate.prefill_flops(tokens) == pytest.approx(model.prefill_flops(tokens))
    estimate.add(prompt, 512, 1e5, 1, Outcome(3, 2))
    whole, own, hit = (model.prefill_flops(512 * blocks) for blocks in (8, 1, 5))
    assert (estimate.flops, estimate.saved_flops) == (pytest.approx(whole), pytest.approx(hit))
    assert estimate.without.mean_s == pytest.approx((whole - own) / 1e15)
    loads_s = 2 * 512 * 1e5 / 1e10 + 2 * 512 * 1e5 / 1e9
    assert estimate.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
    assert estimate.with_cache.percentile_s(0.5) == pytest.approx(estimate.with_cache.mean_s, rel=0.01)
    far = Estimate(Costs(model, 1e15, 1e10, 1e9, shared_bytes_per_s=1e8, shared_round_trip_s=0.25), shared=True)
    far.add(prompt, 512, 1e5, 1, Outcome(3, 2, 2))
    hit = model.prefill_flops(512 * 7)
    assert far.saved_flops == pytest.approx(hit)
    loads_s += 2 * 512 * 1e5 / 1e8 + 2 * 0.25
    assert far.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
    estimate.add(prompt, 512, 1e5, 0, Outcome(8, 0))  # the last token is computed all the same
    assert estimate.saved_flops < hit + whole
