"""What each of the policies compared is known for, and what all policies owe the index."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from policies import ALL, COMPARED
from policies.wtinylfu import WINDOW_LEAST
from policy_rules import Play, first_to_go_of_an_earlier_life, keeps_the_index_whole, leaves_the_same_blocks

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests" / "replay" / "sample.jsonl.gz"


@pytest.mark.parametrize("policy", COMPARED)
def test_what_all_policies_owe(policy: str) -> None:
    keeps_the_index_whole(COMPARED[policy], seed=1)
    leaves_the_same_blocks(policy, COMPARED)
    first = first_to_go_of_an_earlier_life(COMPARED[policy])
    assert policy == "wtinylfu" or first == 9, "the last block of the oldest chain"


@pytest.mark.parametrize(
    ("policy", "least"), [("lru", 0), ("arc", 20), ("s3fifo", 20), ("wtinylfu", 20 - WINDOW_LEAST // 2)]
)
def test_a_scan_does_not_flush_what_is_used_again_and_again(policy: str, least: int) -> None:
    """Twenty prompts again and again, then 500 others once. In W-TinyLFU's window some are when the scan begins."""
    play, hot = Play(policy, 50, ALL), [[number, 1000 + number] for number in range(20)]
    for _ in range(4):
        for ids in hot:
            play.ask(*ids)
    for number in range(500):
        play.ask(10_000 + number)
    assert least <= play.here(hot) <= (20 if least else 0)


def test_the_benchmark_compares_all_policies(tmp_path: Path) -> None:
    """The benchmark finds the compared policies by their names, also in its worker processes."""
    script = ROOT / "bench" / "bench_policies.py"
    command = [sys.executable, script, "--percent", "2", "--policy", "arc", "--policy", "lru"]
    with gzip.open(SAMPLE, "rt") as lines:
        (tmp_path / "sample.jsonl").write_text("".join(itertools.islice(lines, 100)))
    environment = {**os.environ, "TIERCACHE_TRACES": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    tree = json.loads(done.stdout.splitlines()[-1])
    assert [(cell["policy"], cell["percent"]) for cell in tree["cells"]] == [("arc", 2.0), ("lru", 2.0)]
    assert all(0 < cell["total"] <= cell["min_total"] for cell in tree["cells"])
