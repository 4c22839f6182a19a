"""Key files and addresses of the wrong form say what to do; keys are never overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.client.client import Client
from tiercache.errors import ConfigError
from tiercache.protocol.curve import ClientKeys, load_allowed, load_client, load_server, make_client, make_server


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The keys of a daemon, and those of two tenants for it."""
    make_server(tmp_path / "keys")
    for name in ("team-a", "team-b"):
        make_client(tmp_path / "keys", name, tmp_path / f"{name}.toml")
    return tmp_path / "keys"


def test_key_files_of_the_wrong_form_say_what_to_do(keys: Path, tmp_path: Path) -> None:
    good = tmp_path / "team-a.toml"
    assert isinstance(load_client(good), ClientKeys)
    bad = tmp_path / "bad.toml"

    def problem(text: str, mode: int = 0o600) -> str:
        bad.write_text(text)
        bad.chmod(mode)
        with pytest.raises(ConfigError) as error:
            load_client(bad)
        return str(error.value)

    text = good.read_text()
    assert "chmod 0600" in problem(text, 0o640)
    assert "chmod 0600" in problem(text, 0o604)
    assert "not a key file" in problem("-----BEGIN CERTIFICATE-----")
    assert "not a key file" in problem("public_key = 5")
    assert "not a key file" in problem("\x00\xff")
    assert "not a key file" in problem(text + "other = ''\n")
    assert "no server_key" in problem("\n".join(text.splitlines()[:2]))
    assert "secret_key is not a key" in problem("public_key = '" + "0" * 40 + "'\nserver_key = '" + "0" * 40 + "'")
    assert "public_key is not a key" in problem(text.replace("public_key = '", "public_key = 'x"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_client(tmp_path / "none.toml")
    (keys / "clients" / "..bad.toml").write_text(text)
    (keys / "clients" / "team-c.toml").write_text("nothing")
    allowed, problems = load_allowed(keys)
    assert sorted(allowed.values()) == ["team-a", "team-b"]
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://host", "write tcp://HOST:PORT"),
        ("tcp://host:99999?key=x", "write tcp://HOST:PORT"),
        ("tcp://::1:7411?key=x", r"an IPv6 address as \[::1\]"),
        ("tcp://host:1", "only talked to with keys"),
        ("tcp://host:1?cert=x", "only key=FILE"),
        ("tcp://host:1?key=/none.toml", "cannot be read"),
        ("http://host:1", "write a run directory, or tcp://"),
    ],
)
def test_addresses_of_the_wrong_form_say_what_to_do(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Client(address)


def test_what_stands_in_the_way_of_keys_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").symlink_to("/nowhere")
    with pytest.raises(ConfigError, match=r"keys is a symbolic link that leads to nothing.*: name another directory"):
        make_server(tmp_path / "keys")


def test_keys_are_never_overwritten(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never overwritten"):
        make_server(keys)
    with pytest.raises(ConfigError, match="is there already"):
        make_client(keys, "team-a", tmp_path / "new.toml")
    with pytest.raises(ConfigError, match="never overwritten"):
        make_client(keys, "team-z", tmp_path / "team-a.toml")
    assert not (keys / "clients" / "team-z.toml").exists()
    with pytest.raises(ConfigError, match="letters"):
        make_client(keys, "../x", tmp_path / "x.toml")
    assert (tmp_path / "team-a.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("folder", [".", "clients"])
def test_keys_that_all_users_could_add_to_are_refused(keys: Path, folder: str) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    load_server(keys)
    for mode, remedy in ((0o777, "chmod o-w"), (0o1777, "name a folder in it")):  # the latter as /tmp
        (keys / folder).chmod(mode)
        with pytest.raises(ConfigError, match=remedy):
            load_server(keys)
