"""What a daemon records of its requests, as a replay reads it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from waiting import wait_until

import tiercache
from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.observe import recorder as recording
from tiercache.daemon.observe.recorder import Recorder
from tiercache.daemon.observe.traffic import PROBE_ENGINE
from tiercache.daemon.policies import Policies
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.errors import ConfigError
from tiercache.protocol.messages import Priority
from tiercache.replay.formats.recorded import Recorded, RecordedReader
from tiercache.replay.formats.trace import Trace
from tiercache.replay.requests import RequestKind, Told, TraceRequest


class Recording:
    """A recorder with a clock of ours, and two namespaces, the second one windowed."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.now_s = 100.0
        self.path = path
        self.recorder = Recorder(DaemonConfig(record=path, **settings), lambda: self.now_s)
        space = Space(Policies("lru", lambda: self.now_s), Counters())
        form = {"engine": "secret-model", "layout": "x", "dtype": "uint8", "block_bytes": 4096}
        self.chain = space.open_namespace(tiercache.NamespaceSpec(block_size=16, **form))
        self.window = space.open_namespace(tiercache.NamespaceSpec(block_size=8, window_blocks=3, **form))
        self.probe = space.open_namespace(tiercache.NamespaceSpec(block_size=1, **{**form, "engine": PROBE_ENGINE}))

    def look(self, keys: bytes, *had: int, namespaces: list[Namespace] | None = None) -> None:
        self.recorder.looked(namespaces or [self.chain], keys, *(had or (0, 0)), promote=True)

    def close(self) -> Path:
        """The file, with everything in it."""
        self.recorder.close()
        return self.path

    def lines(self) -> list[dict[str, Any]]:
        content = self.close().read_bytes()
        text = gzip.decompress(content) if self.path.suffix == ".gz" else content
        return [json.loads(line) for line in text.splitlines()]

    def requests(self) -> list[TraceRequest]:
        return list(Trace(self.close(), [Recorded()], lambda tokens: 1))


@pytest.fixture(params=["run.jsonl", "run.jsonl.gz"])
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recording]:
    recorded = Recording(tmp_path / request.param)
    yield recorded
    recorded.recorder.close()


def test_what_was_asked_is_read_again(one: Recording) -> None:
    a, b = chain_of("a", 6), chain_of("b", 3)
    one.look(a[:64], 3, 1)
    one.now_s += 1.5
    one.recorder.stored(one.chain, a[48:64], a[64:96])
    one.recorder.looked([one.chain, one.window], b, 0, 0, promote=False)
    one.recorder.fetched([one.chain], a)
    one.recorder.stored(one.window, b"", b)
    one.recorder.forgot([one.chain, one.window], b"", "all")
    one.recorder.forgot([one.chain], a[16:32], "dram")
    found = one.requests()
    names: dict[bytes, bytes] = {}
    for request, keys in zip(found, (a[:64], a, b, a, b, b"", a[16:32]), strict=True):
        assert len(request.keys) == len(keys)
        for at in range(0, len(keys), 16):
            assert names.setdefault(keys[at : at + 16], request.keys[at : at + 16]) == request.keys[at : at + 16]
    assert len(set(names.values())) == len(names)
    assert not set(names) & set(names.values())
    assert [(one.kind, one.first, one.namespaces) for one in found] == [
        (RequestKind.LOOK, 0, (1,)),
        (RequestKind.KEEP, 4, (1,)),
        (RequestKind.LOOK, 0, (1, 2)),
        (RequestKind.FETCH, 0, (1,)),
        (RequestKind.KEEP, 0, (2,)),
        (RequestKind.FORGET, 0, (1, 2)),
        (RequestKind.FORGET, 0, (1,)),
    ]
    assert [request.time_s for request in found] == [100.0] + [101.5] * 6
    assert (found[0].had, found[0].promote, found[2].promote) == ((3, 1), True, False)
    assert (found[5].tier, found[6].tier) == ("", "dram")
    assert (found[0].input_tokens, found[2].input_tokens) == (4 * 16, 3 * 16)


def test_readiness_probes_are_no_traffic(one: Recording) -> None:
    keys = chain_of("a", 2)
    one.recorder.stored(one.probe, b"", keys)
    one.look(keys, 2, 0, namespaces=[one.probe])
    one.recorder.forgot([one.probe], b"", "all")
    one.look(keys)
    one.recorder.forgot([one.probe, one.chain], b"", "all")
    assert [request.kind for request in one.requests()] == [RequestKind.LOOK, RequestKind.FORGET]


def test_nothing_of_keys_models_and_tenants_is_in_the_file(one: Recording) -> None:
    keys = chain_of("a", 4)
    one.look(keys)
    text = json.dumps(one.lines())
    assert "secret-model" not in text
    for at in range(0, len(keys), 16):
        assert keys[at : at + 16].hex() not in text
    other = Recording(one.path.with_name("other.jsonl"))
    other.look(keys)
    assert other.requests()[0].keys != one.requests()[0].keys
    assert one.path.stat().st_mode & 0o777 == 0o600


def test_a_full_queue_loses_requests_and_counts_them(one: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED_BYTES", 100)
    one.look(chain_of("a", 7))
    one.look(chain_of("b", 2))
    trace = Trace(one.close(), [Recorded()], lambda tokens: 1)
    assert [request.blocks for request in trace] == [2]
    assert isinstance(trace.reader, RecordedReader)
    assert trace.reader.lost_requests == one.recorder.stats()["lost_requests"] == 1


def test_a_recording_ends_at_its_size(tmp_path: Path) -> None:
    one = Recording(tmp_path / "run.jsonl", record_max_bytes=1 << 20)
    for number in range(200):
        one.look(chain_of(str(number), 512))
    wait_until(lambda: one.recorder.stats()["ended"])
    one.look(chain_of("late", 3))
    assert "record_max" in one.recorder.stats()["ended"]
    lines = one.lines()
    assert lines[-1]["o"] == "end"
    assert 1 << 20 < one.path.stat().st_size < (1 << 20) + 20_000
    assert len(one.requests()) == len(lines) - 3
    assert one.recorder.stats()["lost_requests"] == 0


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "run.jsonl", Path("/dev/full")):
        with pytest.raises(ConfigError, match=f"record = {path}: .*: make its directory writable"):
            Recorder(DaemonConfig(record=path), lambda: 0.0)


def test_a_daemon_records_hints(tmp_path: Path) -> None:
    path, pool = tmp_path / "trace.jsonl", tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    spec = tiercache.NamespaceSpec(engine="t", layout="x", dtype="uint8", block_size=4, block_bytes=4096)
    chain = tiercache.KeyChain(tiercache.root_key("m"), 4, range(16)).packed()
    with (
        tiercache.launch("16MiB", region="8MiB", record=str(path)) as daemon,
        tiercache.connect(daemon.address, namespace=spec, pool=pool, required=True, request_timeout_s=60.0) as engine,
    ):
        engine.store(chain[:48], [0, 1, 2], hint=tiercache.Hint(priority=Priority.LOW))
        engine.hint(chain, tiercache.Hint(return_in_s=1.5, ttl_s=60), first=1)
        engine.hint(chain, tiercache.Hint(done=True))
    found = [one for one in Trace(path, [Recorded()], lambda tokens: 4096) if one.kind is RequestKind.HINT]
    assert [(one.first, one.blocks, one.told) for one in found] == [
        (0, 3, Told(priority=1)),
        (1, 4, Told(return_in_s=1.5, ttl_s=60.0)),
        (0, 4, Told(done=True)),
    ]
