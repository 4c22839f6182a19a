"""Readers of traces: every format, and what is wrong with lines, files and times."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercache.replay.formats.bailian import Bailian
from tiercache.replay.formats.lines import BadTrace
from tiercache.replay.formats.mooncake import Mooncake
from tiercache.replay.formats.recorded import Recorded
from tiercache.replay.formats.trace import Trace
from tiercache.replay.formats.vllm import KvEvents
from tiercache.replay.requests import RequestKind, TraceRequest, chain_keys

FORMATS = (Recorded(), Bailian(), Mooncake(), KvEvents())
SAMPLE = Path(__file__).parents[1] / "sample.jsonl.gz"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A trace file of these lines: texts as they are, everything else as JSON."""

    def one(*lines: Any) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return one


def trace(path: Path, **options: Any) -> Trace:
    return Trace(path, FORMATS, lambda tokens: tokens * 1024, **options)


def mooncake(time_ms: float = 0, tokens: int = 1024, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    ids = [1, 2] if ids is None else ids
    return {"timestamp": time_ms, "input_length": tokens, "output_length": 7, "hash_ids": ids, **more}


def test_a_mooncake_trace(write: Write) -> None:
    path = write(mooncake(1500, 1024, [1, 2]), "", mooncake(2500, 1500, [1, 2, 3]))
    found = trace(path)
    assert found.format.name == "mooncake"
    assert list(found) == [
        TraceRequest(1.5, chain_keys([1, 2]), 1024),
        TraceRequest(2.5, chain_keys([1, 2]), 1500),  # the last block is a partial one
    ]
    spec = found.specs[1]
    assert (spec.block_size, spec.block_bytes) == (512, 512 * 1024)
    assert list(found) == list(found)


@pytest.mark.parametrize(
    ("size", "lengths"), [(64, (1000, 640, 65)), (16, (100, 33, 4000)), (1024, (5000, 3000, 1025))]
)
def test_the_size_of_blocks_is_guessed_from_the_lengths(write: Write, size: int, lengths: tuple[int, ...]) -> None:
    path = write(*(mooncake(0, length, list(range(-(-length // size)))) for length in lengths))
    assert trace(path).specs[1].block_size == size
    assert [request.blocks for request in trace(path)] == [length // size for length in lengths]
    assert trace(path, block_tokens=2 * size).specs[1].block_size == 2 * size


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ('{"timestamp": 1', "is not JSON"),
        ({"timestamp": 1, "input_length": 5}, "`hash_ids`"),
        (mooncake(ids=["x"]), "hash_ids"),
        ({**mooncake(), "input_length": "many"}, "input_length: expected `int`, got `str`"),
        (mooncake(tokens=-5), "a length below 0"),
        (mooncake(ids=[-1, 2]), "a number below 0"),
        (mooncake(ids=[1 << 70, 2]), "beyond 64 bits"),
        ("[1, 2]", "expected `object`"),
        ("\x00\xff", "is not JSON"),
    ],
)
def test_a_bad_line_is_named_or_left_out(write: Write, line: Any, words: str) -> None:
    path = write(mooncake(), mooncake(1), line, mooncake(2))
    with pytest.raises(BadTrace, match=r"trace.jsonl line 3: ") as raised:
        list(trace(path))
    assert words in str(raised.value)
    assert str(raised.value).endswith("--skip-bad leaves such lines out")
    skipping = trace(path, skip_bad=True)
    assert len(list(skipping)) == 3
    assert (skipping.bad_lines, "line 3: " in skipping.first_problem) == (1, True)
    assert len(list(trace(write(line, mooncake()), skip_bad=True))) == 1, "also as the first line"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b'{"a": 1}\n', "no format that is known"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=words):
        trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        trace(tmp_path / "missing.jsonl")
    with pytest.raises(BadTrace, match="Is a directory"):
        trace(tmp_path)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(SAMPLE.read_bytes()[:9000])
    with pytest.raises(BadTrace, match="cut off; --skip-bad takes what is there"):
        list(trace(cut))
    some = trace(cut, skip_bad=True)
    assert 0 < len(list(some)) < len(list(trace(SAMPLE))) == 600
    assert some.bad_lines == 1
    damaged = bytearray(SAMPLE.read_bytes())
    damaged[9000:9100] = bytes(100)
    cut.write_bytes(damaged)
    with pytest.raises(BadTrace, match=r"is damaged|is not JSON"):
        list(trace(cut))


def test_a_bailian_trace(write: Write) -> None:
    first = {
        "chat_id": 55,
        "parent_chat_id": -1,
        "timestamp": 1.25,
        "input_length": 40,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 8, 9],
    }
    second = {**first, "chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "turn": 2}
    found = trace(write(first, second))
    assert found.format.name == "bailian"
    assert [(one.time_s, one.keys, one.input_tokens) for one in found] == [
        (time_s, chain_keys([7, 8]), 40) for time_s in (1.25, 61.114)
    ]
    assert found.specs[1].block_size == 16
    with pytest.raises(BadTrace, match=r"line 2: .*`hash_ids`"):
        list(trace(write(first, {key: value for key, value in second.items() if key != "hash_ids"})))


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    tokens = list(range(16 * len(hashes)))
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def test_kv_events(write: Write) -> None:
    path = write(
        [100.0, [stored([11, 12]), stored([13], 12)], 0],  # chunks of one prompt
        [101.5, [{"type": "BlockRemoved", "block_hashes": [13], "medium": "GPU"}, stored([14], 13)], 0],  # generated
        {"ts": 103.0, "events": [stored([21, 22], 12), stored([11], None, medium="CPU")]},
        [104.0, [["BlockStored", [31], None, list(range(16)), 16, None, "GPU"], ["AllBlocksCleared"]]],
    )
    found = trace(path)
    assert found.format.name == "vllm"
    chains = [[11, 12, 13], [11, 12, 13, 14], [11, 12, 21, 22], [31]]
    requests = list(found)
    assert [request.keys for request in requests] == list(map(chain_keys, chains))
    assert [(one.time_s, one.kind, one.first, one.in_gpu) for one in requests] == [
        (0.0, RequestKind.ASK, 0, 0),
        (1.5, RequestKind.KEEP, 3, 0),
        (3.0, RequestKind.ASK, 0, 2),
        (4.0, RequestKind.ASK, 0, 0),
    ]
    assert found.specs[1].block_size == 16


HEADER = {"tiercache_trace": 1}
DECLARED = {"t": 0, "o": "ns", "number": 1, "block_tokens": 16, "block_bytes": 4096}
LOOK = {"t": 1, "o": "m", "n": [1], "c": 0}
HINT = {"t": 1, "o": "h", "n": [1], "b": 0, "c": 0, "at": 0, "k": "AAAAAAAAAAAAAAAA"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**LOOK, "n": [7], "k": ""}, "must name namespaces of lines before it"),
        ({"t": 1, "o": "x"}, "o is 'x'"),
        ({"o": "m"}, "`t`"),
        ({**LOOK, "b": 3, "c": 3, "at": 2}, "2 blocks of chain 3, which has 0"),
        ({**LOOK, "k": "AAAA"}, "k has 3 bytes"),
        ({**LOOK, "k": "%"}, "k is not base64"),
        ({**LOOK, "had": [1]}, "had is [1]"),
        ({**LOOK, "o": "s", "k": "A" * 16, "f": 9}, "f is 9"),
        ({"t": 1, "o": "ns", "number": 2}, "block_bytes is 0"),
        ({**HINT, "return_ms": -1}, ""),
        ({**HINT, "priority": 7}, ""),
        ({**HINT, "done": True, "return_ms": 5}, ""),
        ({**HINT, "first": 9}, ""),
    ],
)
def test_bad_lines_of_a_recording(write: Write, line: dict[str, Any], words: str) -> None:
    with pytest.raises(BadTrace, match="line 3: ") as raised:
        list(trace(write(HEADER, DECLARED, line)))
    assert words in str(raised.value)


def test_recordings_of_other_versions_are_refused(write: Write) -> None:
    with pytest.raises(BadTrace, match="version 2 of recordings: this release reads version 1"):
        trace(write({"tiercache_trace": 2}))
