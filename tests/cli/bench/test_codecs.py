"""`tiercache bench codec`: real codecs, a real file, figures that follow from each other."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from command_line import Run, assert_refused

from tiercache.cli.bench import codecs, disk


@pytest.fixture
def bench(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command, which measures as briefly as possible."""
    monkeypatch.setattr(codecs, "MEASURE_S", 0.0)
    monkeypatch.setattr(codecs, "SYNTHETIC_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "DISK_BYTES", 8 << 20)
    return lambda *arguments: run("bench", "codec", *arguments)


def test_blocks_of_files(bench: Run, tmp_path: Path) -> None:
    easy, hard = tmp_path / "easy", tmp_path / "hard"
    easy.write_bytes(bytes(10 * 8192 + 17))
    hard.write_bytes(random.Random(1).randbytes(10 * 8192))
    arguments = ["--block-bytes", "8KiB", "--dtype", "float32", "--json"]
    for path, share, ratio in ((easy, 1.0, 2.0), (hard, 0.0, 1.0)):
        tree = json.loads(bench("--file", path, *arguments)[1])
        assert (tree["blocks"], tree["source"]) == (10, str(path))
        for figures in tree["codecs"]:
            assert (figures["encoded_share"], figures["ratio"]) == (share, ratio)
    both = json.loads(bench("--file", easy, "--file", hard, *arguments)[1])
    assert (both["blocks"], both["codecs"][0]["encoded_share"]) == (20, 0.5)


def test_the_disk_is_measured_and_left_as_it_was(bench: Run, tmp_path: Path) -> None:
    measured = json.loads(bench("--dir", tmp_path, "--block-bytes", "64KiB", "--json")[1])["disk"]
    assert (measured["directory"], measured["bytes"]) == (str(tmp_path), 8 << 20)
    assert measured["write_bytes_per_s"] > 0
    assert measured["read_bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-bytes", "much"], "--block-bytes = much"),
        (["--block-bytes", "0"], "must be 1 to"),
        (["--dtype", "float16"], "give --file"),
        (["--file", "/nowhere"], "--file = /nowhere"),
        (["--file", "/dev/null"], "is shorter than a block"),
        (["--dir", "/nowhere"], "--dir = /nowhere"),
    ],
)
def test_a_wrong_command_line_is_one_line(bench: Run, arguments: list[str], words: str) -> None:
    assert_refused(bench(*arguments), words)
