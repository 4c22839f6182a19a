"""Daemons as hosts over real stores: what they share, what operators see of it, and a store that comes and goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from fault_engine import Engine
from prometheus_client.parser import text_string_to_metric_families
from s3_rig import KEY, SECRET, FakeServer
from valkey_rig import ValkeyServer
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.client import launcher
from tiercache.client.client import Client
from tiercache.http.families import PREFIX, SHARED
from tiercache.http.metrics import metrics_text

BLOCK_BYTES = 16 << 10
BLOCKS = 32
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)


class Host:
    """A daemon, and an engine whose prompts have 32 blocks."""

    def __init__(self, run_dir: Path, store: str, **settings: Any) -> None:
        settings = {"shared_lookup_timeout": "1s", **settings}
        self.daemon = tiercache.launch("32MiB", run_dir=run_dir, shared=store, **settings)
        self.address = self.daemon.address
        self.engine = Engine(self.address, SPEC, BLOCKS, request_timeout_s=60.0)
        self.connector = self.engine.connector

    def store(self, name: str) -> None:
        assert self.engine.store(chain_of(name, BLOCKS)).stored == BLOCKS

    def share(self, name: str) -> None:
        """Store a prompt, and wait until the store of all hosts has its blocks."""
        written = self.shared("written_blocks")
        self.store(name)
        wait_until(lambda: self.shared("written_blocks") == written + BLOCKS, "the blocks in the store")

    def load(self, name: str) -> int:
        """Good blocks of a prompt; all of them are compared."""
        return self.engine.load(chain_of(name, BLOCKS))

    def finds(self, name: str) -> None:
        """Wait until all blocks are found: a look-up may come too late for one request."""
        wait_until(lambda: self.load(name) == BLOCKS, f"the blocks of {name}")

    def stats(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.connector.client.stats()
        return tree

    def shared(self, name: str) -> Any:
        return self.stats()["tiers"]["shared"][name]

    def forget_dram(self) -> None:
        self.connector.flush(tier="dram")

    def close(self) -> None:
        self.engine.close()
        self.daemon.close()


@contextmanager
def brief() -> Iterator[None]:
    """Meanwhile `tiercache.launch` starts daemons whose waits for a store are short."""
    script = str(Path(__file__).parent / "brief_daemon.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "python_command", lambda module, *options: [sys.executable, script, *options])
        yield


PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer("--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl") as server:
        server.change_password(PASSWORD)
        yield server


@pytest.fixture(scope="module")
def hosts(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    place = tmp_path_factory.mktemp("hosts")
    key = place / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    a, b = (Host(place / name, url_of(valkey), shared_key=key, log=place / f"{name}.log") for name in "ab")
    yield a, b
    for one in (a, b):
        one.close()
    for log in place.glob("*.log"):
        assert PASSWORD not in log.read_text()


def url_of(valkey: ValkeyServer) -> str:
    return valkey.url.replace("://", f"://:{PASSWORD}@")


def metrics(host: Host) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    families = text_string_to_metric_families(metrics_text(host.connector.client.stats(histograms=True)).decode())
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_prompt_of_one_host_is_a_hit_on_another(hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]) -> None:
    """Told apart from hits on NVMe, in metrics and for people."""
    a, b = hosts
    a.share("one")
    b.finds("one")
    b.finds("one")
    assert b.shared("fetched_blocks") == BLOCKS, "the second time from DRAM"
    told = metrics(b)
    assert told["match_blocks_shared_total",] == told["hit_blocks_total", "shared"] == BLOCKS
    assert told["hit_blocks_total", "nvme"] == told["hit_tokens_total", "nvme"] == 0
    assert told["hit_tokens_total", "shared"] == 4 * BLOCKS
    assert told["namespace_hit_blocks_total", SPEC.fingerprint(), "test/1", "tp 0/1 pp 0/1", "shared"] == BLOCKS
    assert told["shared_fetched_bytes_total",] == told["moved_bytes_total", "shared", "out"] >= BLOCKS * BLOCK_BYTES
    assert told["shared_breaker_state", "closed"] == 1
    assert told["shared_bad_blocks_total",] == 0
    assert not [family.name for family in SHARED if not any(name[0] in family.full_name for name in told)]
    sent = metrics(a)
    assert sent["moved_bytes_total", "shared", "in"] == sent["shared_written_bytes_total",] >= BLOCKS * BLOCK_BYTES
    assert main(["stats", "summary", "tiers", "--address", b.address]) == 0
    assert "from the shared store" in capsys.readouterr().out


def test_the_password_is_shown_nowhere(hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]) -> None:
    a, _ = hosts
    shown = [Path(f"/proc/{a.daemon.pid}/cmdline").read_text(), str(a.stats())]
    for options in ([], ["--json"]):
        assert main(["config", "--running", *options, "--address", a.address]) == 0
        shown.append(capsys.readouterr().out)
    assert "valkey://:***@127.0.0.1" in shown[-1]
    assert [text for text in shown if PASSWORD in text] == []


@pytest.mark.parametrize("what", ["everything", "namespace", "prefix"])
def test_a_flush_of_the_store_is_one_for_every_host(
    hosts: tuple[Host, Host], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = hosts
    namespace, prefix = ["--namespace", SPEC.fingerprint()[:8]], ["--prefix", chain_of(what, BLOCKS)[-16:].hex()]
    options = {"namespace": namespace, "prefix": [*prefix, *namespace]}
    a.share(what)
    b.finds(what)
    assert main(["check", "--address", b.address]) == 0
    assert "clean" in capsys.readouterr().out
    assert main(["flush", "--yes", *prefix, "--address", b.address]) == 2
    text = f"--prefix with a shared store needs --namespace, once or more: there are 1 ({SPEC.fingerprint()})"
    assert text in capsys.readouterr().err
    a.forget_dram()  # what a host still has it sends again when it is asked for
    assert main(["flush", "--yes", "--tier", "shared", *options.get(what, []), "--address", b.address]) == 0
    assert capsys.readouterr().out == "flushed: no host finds these blocks in the shared store any more\n"
    b.forget_dram()
    assert b.load(what) == a.load(what) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--shared", "valkey://127.0.0.1:1"], "set shared_key"),
        (["--shared", "mooncake://host", "--shared-plain", "yes"], "no kind of store is called 'mooncake'"),
        (["--shared", "valkey://u:secret-word@h:99999", "--shared-plain", "yes"], "port"),
    ],
)
def test_a_mistake_is_told_before_the_daemon_serves(tmp_path: Path, settings: list[str], says: str) -> None:
    command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(tmp_path / "run"), "--arena", "8MiB"]
    ended = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert ended.returncode == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "secret-word" not in ended.stderr


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(store: str, **settings: Any) -> Host:
        name = str(settings.pop("name", len(made)))
        made.append(Host(tmp_path / name, store, **{"shared_plain": "yes", **settings}))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_hosts_share_other_kinds_of_stores(
    make: Callable[..., Host], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    if kind == "bucket":
        pytest.importorskip("obstore", reason="needs Python 3.11 or later")
    (tmp_path / "kv").mkdir()
    server = FakeServer()
    try:
        url = server.url() if kind == "bucket" else f"file://{tmp_path}/kv"
        a, b = make(url), make(url)
        a.share("one")
        b.finds("one")
        assert b.shared("bad_blocks") == 0
        a.connector.flush()
        b.forget_dram()
        assert b.load("one") == 0
        b.share("one")
        a.finds("one")
    finally:
        server.end()


@pytest.mark.stress
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_store_that_goes_and_comes_back(make: Callable[..., Host], how: str) -> None:
    """Hosts serve what they have, take new prompts, say what is wrong, and use the store when it is back."""
    with ValkeyServer() as valkey, brief():
        a, b = make(valkey.url), make(valkey.url)
        a.share("one")
        b.finds("one")
        (valkey.kill if how == "killed" else valkey.stop)()
        try:
            assert b.load("one") == BLOCKS
            b.store("two")
            assert b.load("two") == BLOCKS
            a.forget_dram()
            wait_until(lambda: a.load("one") == 0 and a.stats()["health"]["state"] == "degraded")
        finally:
            (valkey.start if how == "killed" else valkey.go_on)()
        wait_until(lambda: {one.stats()["health"]["state"] for one in (a, b)} == {"ok"})
        if how == "stopped":
            a.finds("one")
        a.share("three")
        b.finds("three")


@pytest.mark.stress
def test_a_flush_of_a_store_that_is_away_outlives_kill_9(
    make: Callable[..., Host], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told by the next life of the daemon, which uses nothing of the store before."""
    state = {"shared_state": str(tmp_path / "state")}
    with ValkeyServer() as valkey, brief():
        a, b = make(valkey.url, name="a", **state), make(valkey.url)
        a.share("one")
        valkey.change_password("another")
        assert a.connector.flush() == BLOCKS
        told = f"{BLOCKS} blocks flushed on this host; the shared store has not confirmed the flush: it is kept"
        assert told in caplog.text
        assert main(["flush", "--yes", "--tier", "shared", "--address", a.address]) == 0
        assert "it is kept, across restarts too" in capsys.readouterr().out
        with Client.connect(a.address, request_timeout_s=0.5) as hasty:
            hasty.flush(tier="shared")  # which takes longer than other requests may
            assert (hasty.alive, hasty.times_down) == (True, 0)
        assert metrics(a)["shared_flushes_waiting",] == 2
        a.daemon.kill()
        valkey.change_password("")
        b.finds("one")  # the store was not told
        b.forget_dram()
        a = make(valkey.url, name="a", **state)
        wait_until(lambda: a.shared("flushes_waiting") == 0, "the store is told")
        assert a.load("one") == b.load("one") == 0


@pytest.mark.stress
def test_a_folder_that_hangs_costs_nobody_a_request(make: Callable[..., Host], tmp_path: Path) -> None:
    """What calls the folder is a process of its own, which is replaced."""
    (tmp_path / "kv").mkdir()
    with brief():
        a = make(f"file://{tmp_path}/kv")
        a.share("one")
        of_threads = Path(f"/proc/{a.daemon.pid}/task").glob("*/children")
        children = [child for path in of_threads for child in path.read_text().split()]
        (helper,) = [one for one in children if b"helper" in Path(f"/proc/{one}/cmdline").read_bytes()]
        os.kill(int(helper), signal.SIGSTOP)
        a.forget_dram()
        a.store("two")
        assert a.load("two") == BLOCKS
        assert a.load("one") == 0
        a.finds("one")
