"""`tiercache bench codec`: real codecs, a real file, figures that follow from each other."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercache.cli.bench import codecs, command, disk
from tiercache.cli.bench.codecs import CodecFigures
from tiercache.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line: (exit status, stdout, stderr). Measures as briefly as possible."""
    monkeypatch.setattr(codecs, "MEASURE_S", 0.0)
    monkeypatch.setattr(codecs, "SYNTHETIC_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "DISK_BYTES", 8 << 20)

    def run_one(*arguments: object) -> tuple[int, str, str]:
        status = main(["bench", "codec", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return run_one


def test_made_up_blocks_are_said_to_be(run: Run) -> None:
    status, out, err = run("--block-bytes", "64KiB")
    assert (status, err) == (0, "")
    assert "made up: normal values" in out
    assert "lz4" in out
    assert "cores to write here" not in out


def test_made_up_blocks_are_bfloat16_values_that_get_smaller(run: Run) -> None:
    tree = json.loads(run("--json", "--block-bytes", "64KiB")[1])
    assert (tree["blocks"], tree["block_bytes"], tree["disk"]) == (16, 65536, None)
    for figures in tree["codecs"]:
        assert 1.05 < figures["ratio"] < 2
        assert figures["encoded_share"] == 1.0


def test_blocks_of_files(run: Run, tmp_path: Path) -> None:
    easy, hard = tmp_path / "easy", tmp_path / "hard"
    easy.write_bytes(bytes(10 * 8192 + 17))
    hard.write_bytes(random.Random(1).randbytes(10 * 8192))
    arguments = ["--block-bytes", "8KiB", "--dtype", "float32", "--json"]
    for path, share, ratio in ((easy, 1.0, 2.0), (hard, 0.0, 1.0)):
        tree = json.loads(run("--file", path, *arguments)[1])
        assert (tree["blocks"], tree["source"]) == (10, str(path))
        for figures in tree["codecs"]:
            assert (figures["encoded_share"], figures["ratio"]) == (share, ratio)
    both = json.loads(run("--file", easy, "--file", hard, *arguments)[1])
    assert (both["blocks"], both["codecs"][0]["encoded_share"]) == (20, 0.5)


def test_blocks_are_taken_from_all_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_SAMPLE_BYTES", 4 * 100)
    path = tmp_path / "long"
    path.write_bytes(b"".join(bytes([number]) * 100 for number in range(40)))
    assert [block[0] for block in codecs.blocks_of([path], 100)] == [0, 10, 20, 30]


def test_the_disk_is_measured_and_left_as_it_was(run: Run, tmp_path: Path) -> None:
    tree = json.loads(run("--dir", tmp_path, "--block-bytes", "64KiB", "--json")[1])
    measured: dict[str, Any] = tree["disk"]
    assert (measured["directory"], measured["bytes"]) == (str(tmp_path), 8 << 20)
    assert measured["write_bytes_per_s"] > 0
    assert measured["read_bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []
    out = run("--dir", tmp_path, "--block-bytes", "64KiB")[1]
    assert "cores to write here" in out


def test_figures_follow_from_each_other() -> None:
    figures = CodecFigures("lz4", 1.25, 1.0, encode_bytes_per_s=1e9, decode_bytes_per_s=3e9)
    assert figures.write_pays_below == pytest.approx(0.2e9)
    assert figures.read_pays_below == pytest.approx(0.6e9)
    # At that bandwidth a block takes as long with the codec as without.
    with_it_s = 1 / 1e9 + 1 / 1.25 / 0.2e9
    assert with_it_s == pytest.approx(1 / 0.2e9)
    assert command._cores(1e9, figures.write_pays_below) == "5.0"
    useless = figures._replace(ratio=1.0)
    assert command._cores(1e9, useless.write_pays_below) == "never"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-bytes", "much"], "--block-bytes = much"),
        (["--block-bytes", "0"], "must be 1 to"),
        (["--dtype", "float16"], "give --file"),
        (["--file", "/nowhere"], "--file = /nowhere"),
        (["--dir", "/nowhere"], "--dir = /nowhere"),
    ],
)
def test_a_wrong_command_line_is_one_line(run: Run, arguments: list[str], words: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_file_shorter_than_a_block_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    status, _, err = run("--file", tmp_path / "short")
    assert status == 2
    assert "is shorter than a block" in err


def test_a_full_disk_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DISK_BYTES", 1 << 60)
    status, _, err = run("--dir", tmp_path)
    assert status == 2
    assert "more room" in err
    assert os.listdir(tmp_path) == []
