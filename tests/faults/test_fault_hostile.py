"""Admitted but hostile: a tenant that takes all it can get, and local users who set traps."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fault_processes import Daemon
from fault_tenants import free_port
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.client.client import Client
from tiercache.errors import ConfigError, DaemonUnavailable, RequestRefused
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.protocol import messages as m
from tiercache.protocol.curve import make_client, make_server
from tiercache.protocol.keys import content_id, salted_root

SPEC = tiercache.NamespaceSpec(engine="hostile/1", layout="x", dtype="uint8", block_size=4, block_bytes=64)
STRANGER = 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")


class Site:
    """A daemon that listens on TCP, and tenants' keys."""

    def __init__(self, folder: Path, start: Callable[..., Daemon]) -> None:
        self.keys, self.folder = folder / "keys", folder
        make_server(self.keys)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        listen = ("--listen", self.endpoint, "--curve-keys", str(self.keys))
        self.daemon = start("--arena", "64MiB", "--region", "16MiB", *listen)

    def address(self, name: str) -> str:
        """How a tenant reaches the daemon, with keys that are made the first time."""
        path = self.folder / f"{name}.toml"
        if not path.exists():
            make_client(self.keys, name, path)
        return f"{self.endpoint}?key={path}"


@pytest.fixture
def site(tmp_path: Path, start_daemon: Callable[..., Daemon]) -> Site:
    return Site(tmp_path, start_daemon)


def chain(salt: str, tokens: list[int]) -> bytes:
    return tiercache.KeyChain(salted_root(content_id("a model"), salt), 4, tokens).packed()


def open_connector(closing: ExitStack, address: str, blocks: int = 8) -> tiercache.Connector:
    pool = tiercache.Pool.from_blocks(np.zeros((blocks, 64), np.uint8))
    its = tiercache.connect(address, namespace=SPEC, pool=pool, required=True, request_timeout_s=30.0)
    return closing.enter_context(its)


def test_namespaces_by_the_thousand(site: Site, closing: ExitStack) -> None:
    greedy = closing.enter_context(Client.connect(site.address("greedy")))

    def register(client: Client, number: int) -> None:
        client.register(msgspec.structs.replace(SPEC, extra={"number": str(number)}))

    for number in range(256):
        register(greedy, number)
    with pytest.raises(RequestRefused, match="tenant greedy has registered 256 namespaces"):
        register(greedy, 256)
    register(greedy, 0)
    register(closing.enter_context(Client.connect(site.address("other"))), 0)
    register(closing.enter_context(Client.connect(site.daemon.run_dir, map_arena=False)), 256)


def test_leases_do_not_fill_the_daemons_memory(site: Site, closing: ExitStack) -> None:
    blocks = 2048
    keys = chain("", list(range(4 * blocks)))
    local = open_connector(closing, site.daemon.run_dir, 512)
    greedy = open_connector(closing, site.address("greedy"), 512)
    for first in range(0, blocks, 512):
        assert greedy.store(keys[: 16 * (first + 512)], range(512), first=first).stored == 512
    tenant, mine = greedy.client, greedy.client.register(SPEC)

    def match() -> None:
        found = tenant.call(m.Match, namespaces=[mine], keys=keys, ttl_ms=60_000)
        assert isinstance(found, m.Matched)
        assert found.dram_blocks == blocks

    taken = (16 << 20) // len(keys)
    for _ in range(taken):
        match()
    with pytest.raises(RequestRefused, match="release some"):
        match()
    assert local.store(keys, range(512)).stored == 512, "others go on"


def test_a_tenant_asks_how_much_of_its_prompts_is_stored(
    site: Site, closing: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = list(range(16))
    owner = open_connector(closing, site.address("team-a"))
    owner.store(chain("s", tokens), [0, 1, 2, 3])
    owner.announce([m.ModelCard(["demo"], content_id("a model"), [SPEC.fingerprint()], 4)])
    with Client.connect(site.address("team-a"), request_timeout_s=30.0) as router:
        affinity = Affinity(router)

        def ask(**fields: Any) -> dict[str, Any]:
            return affinity.ask(Query(**{"model": "demo", "tokens": tokens, "salt": "s", **fields}))

        def is_known() -> bool:
            try:
                return bool(ask())
            except UnknownModel:
                return False

        wait_until(is_known, "the card is reported")
        assert (ask()["matched"], ask(salt="")["matched"]) == (16, 0)
    (tmp_path / "tokens").write_text(str(tokens))
    question = ["affinity", "--model", "demo", "--tokens", str(tmp_path / "tokens"), "--salt", "s"]
    assert main([*question, "--address", site.address("team-a")]) == 0
    assert "16" in capsys.readouterr().out
    # Clients on the daemon's host find it too; another tenant does not even learn that the model exists.
    assert main([*question, "--address", site.daemon.run_dir]) == 0
    with Client.connect(site.address("team-b")) as other:
        assert other.call(m.Models).models == []


def test_a_tenant_cannot_speak_for_another_ones_namespaces(site: Site, closing: ExitStack) -> None:
    own = open_connector(closing, site.address("team-b"))
    session = own.client.session()
    foreign = SPEC.of_tenant("team-a").fingerprint()
    card = m.ModelCard(["demo"], content_id("a model"), [foreign], 4)
    session.call(m.Report, m.Done, registration="none", counters={}, models=[card])
    for address in (site.address("team-b"), site.daemon.run_dir):
        with Client.connect(address, map_arena=False) as asker:
            listed = asker.call(m.Models)
            assert (listed.models, listed.namespaces) == ([], {})


@needs_root
def test_a_false_daemon_in_a_folder_for_all_users(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Another user took the path in /tmp first: that daemon would get all blocks, and could answer with anything."""
    daemon = start_daemon()  # below /tmp, and root's

    def outcome(run_dir: str) -> str:
        its, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(STRANGER)
                Client.connect(run_dir, timeout_s=1.0)
                said = "connected"
            except (DaemonUnavailable, ConfigError) as error:
                said = str(error)
            finally:
                os.write(ours, said.encode())
                os._exit(0)
        os.close(ours)
        os.waitpid(pid, 0)
        with os.fdopen(its) as file:
            return file.read()

    os.chown(daemon.run_dir, STRANGER + 1, -1)
    assert "it may be no daemon of ours" in outcome(daemon.run_dir)
    link = Path(daemon.run_dir + "-link")
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER + 1, -1, follow_symlinks=False)
    try:
        assert "it may be no daemon of ours" in outcome(str(link))
        late = Daemon("--arena", "16MiB", run_dir=str(link))
        assert late.launch().wait(20) != 0
        assert "is another user's symbolic link" in late.log()
        late.close()
    finally:
        link.unlink()
        os.chown(daemon.run_dir, 0, -1)


def test_keys_that_all_users_could_add_to(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_server(keys)
    assert keys.stat().st_mode & 0o777 == 0o700
    (keys / "clients").chmod(0o777)
    daemon = Daemon("--arena", "16MiB", "--listen", "tcp://127.0.0.1:1", "--curve-keys", str(keys))
    try:
        assert daemon.launch().wait(20) != 0
        assert "chmod o-w" in daemon.log()
    finally:
        daemon.close()


def test_names_do_not_forge_lines_of_the_log(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    place = tmp_path / "kv\n2026-01-01 INFO all is well\x1b[2J"
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--nvme", str(place), "--nvme-size", "64MiB")
    with Client.connect(daemon.run_dir, name="x\n<3>ERROR forged", map_arena=False) as client:
        client.flush()
    log = daemon.log()
    assert "kv\\n2026" in log
    assert "\x1b" not in log
    assert not any(line.startswith(("2026-01-01", "<3>ERROR")) for line in log.splitlines())
