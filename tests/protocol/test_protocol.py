"""`daemon/PROTOCOL.md` says what the code does; keys, checksums, hints and key files are what they should be."""

from __future__ import annotations

import itertools
import math
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from raw_client import ROOT, content_id, next_key, root_key

from tiercache.client.client import Client
from tiercache.connector.connector import check_keys
from tiercache.errors import ConfigError
from tiercache.protocol import messages
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3, block_checksum, block_seed
from tiercache.protocol.curve import ClientKeys, load_allowed, load_client, load_server, make_client, make_server
from tiercache.protocol.hints import Hint
from tiercache.protocol.keys import KeyChain
from tiercache.protocol.keys import content_id as code_content_id
from tiercache.protocol.keys import root_key as code_root_key
from tiercache.protocol.messages import MAX_HINT_MS, Priority
from tiercache.protocol.namespaces import NamespaceSpec


def _document() -> str:
    return (ROOT / "daemon" / "PROTOCOL.md").read_text()


def _section(title: str) -> str:
    return next(part for part in _document().split("\n## ") if part.startswith(title))


def _vectors() -> dict[str, bytes]:
    found = re.findall(r"^ *vector ([a-z0-9_]+) +([0-9a-f]+)$", _document(), re.MULTILINE)
    return {name: bytes.fromhex(digits) for name, digits in found}


def test_the_documented_vectors_are_what_the_code_computes() -> None:
    plain = code_root_key("demo")
    salted = code_root_key("demo", salt="s3cret", epoch=2, extra=[("lora", "b7"), ("config", "9f")])
    chain = KeyChain(plain, 4, [1, 2, 3, 4, 100, 200, 300, 400_000])
    with_extra = KeyChain(plain, 4)
    with_extra.extend([1, 2, 3, 4], extra=b"image:77")
    match = messages.Match(7, bytes(range(16)), 81985529216486895, 5_000_000, [1], chain.packed(), 30_000, 2)
    spec = NamespaceSpec(
        engine="demo/1", layout="layer,2,slot,kv_head,head_dim", dtype="bfloat16", block_size=4, block_bytes=8192
    )
    assert _vectors() == {
        "content": code_content_id("demo"),
        "root_plain": plain,
        "root_salted": salted,
        "h_1": chain.key(0),
        "h_2": chain.key(1),
        "h_1_with_extra": with_extra.key(0),
        "frames": messages.pack_frames([0, 8192, 3 << 48 | 4096]),
        "indices": messages.pack_indices([0, 1, 511]),
        "extents": messages.pack_extents([messages.Extent(3, 0, 2, 0, 8192, 4096, 4096, 0x0123456789ABCDEF)]),
        "lanes_hello": block_checksum(b"hello", 7, CHECKSUM_LANES).to_bytes(8, "big"),
        "match": msgspec.msgpack.encode(match),
        "fingerprint": bytes.fromhex(spec.fingerprint()),
    }


def test_the_documented_vectors_are_what_a_stranger_computes() -> None:
    vectors = _vectors()
    assert vectors["content"] == content_id("demo")
    assert vectors["root_plain"] == root_key("demo")
    assert vectors["root_salted"] == root_key("demo", b"s3cret", 2, [("lora", "b7"), ("config", "9f")])
    assert vectors["h_1"] == next_key(vectors["root_plain"], [1, 2, 3, 4])
    assert vectors["h_2"] == next_key(vectors["h_1"], [100, 200, 300, 400_000])
    assert vectors["h_1_with_extra"] == next_key(vectors["root_plain"], [1, 2, 3, 4], b"image:77")
    assert vectors["frames"] == struct.pack("<3Q", 0, 8192, (3 << 48) + 4096)
    assert vectors["indices"] == struct.pack("<3I", 0, 1, 511)
    assert vectors["extents"] == struct.pack("<IHBBQIIQ", 3, 0, 2, 0, 8192, 4096, 4096, 0x0123456789ABCDEF)
    assert vectors["lanes_hello"] == _lanes(b"hello", 7).to_bytes(8, "big")
    header = [7, bytes(range(16)), 81985529216486895, 5_000_000]
    keys = vectors["h_1"] + vectors["h_2"]
    assert vectors["match"] == msgpack.packb(["match", *header, [1], keys, 30_000, 2, False, False])


def _lanes(data: bytes, seed: int) -> int:
    """Checksum kind 2 as the document has it, of at most one stripe."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    lanes = struct.unpack(f"<{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))
    stripe = sum(lane * mix((number + 1) * golden % 2**64) for number, lane in enumerate(lanes))
    return mix(mix((stripe + golden) % 2**64) ^ seed)


def test_the_documented_limits_and_tags_are_those_of_the_code() -> None:
    limits = re.findall(r"^\| `([A-Z_]+)` +\| ([0-9 ]+) ", _section("Limits"), re.MULTILINE)
    assert len(limits) > 10
    for name, value in limits:
        assert int(value.replace(" ", "")) == getattr(messages, name), name
    for union in (messages.ANY_REQUEST, messages.ANY_REPLY):
        for struct_type in union.__args__:
            fields = [field.name for field in msgspec.structs.fields(struct_type)]
            own = fields[4:] if union is messages.ANY_REQUEST else fields[2:]
            tag = struct_type.__struct_config__.tag
            row = re.search(rf"^\| `{tag}` +\|(.*)\|$", _document(), re.MULTILINE)
            assert row is not None, tag
            assert re.findall(r"`([a-z_]+)` \(", row[1]) == own, tag
    for code in messages.ErrorCode:
        assert f"| `{code.value}`" in _section("Error codes")


def test_keys_do_not_depend_on_the_pieces_in_which_tokens_come() -> None:
    root, tokens = root_key("demo"), list(range(40))
    whole = KeyChain(root, 4, tokens)
    for step in (1, 3, 4, 7):
        pieces = KeyChain(root, 4)
        became_full = [pieces.extend(tokens[at : at + step]) for at in range(0, 40, step)]
        assert sum(became_full) == len(pieces) == 10
        assert pieces.packed() == whole.packed()


# --- what is no token id and no key is refused, not rounded: other tokens' blocks would be found -----


@pytest.mark.parametrize(
    "tokens", [[0.9, 1.9], [True, False], [-1], [1 << 32], [1 << 70], np.array([0, np.nan]), ["1"]]
)
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token ids must be integers from 0 to 4294967295"):
        KeyChain(bytes(16), 2, tokens)


def test_keys_that_are_no_bytes_are_refused() -> None:
    for keys in (b"", bytearray(16), memoryview(bytes(32))):
        check_keys(keys)
    with pytest.raises(TypeError, match="keys are bytes"):
        check_keys("x" * 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="these are 17 bytes"):
        check_keys(bytes(17))


# --- the checksum identifies the block to which bytes belong -----------------------------------------


KEY, NAMESPACE = bytes(range(16)), "0123456789abcdef" * 2


def test_seeds_and_checksums_never_change() -> None:
    """These values are pinned: with others every block that is on a disk would be a miss."""
    seed = block_seed(KEY, NAMESPACE, 2 << 20, 0, CHECKSUM_XXH3)
    assert (CHECKSUM_XXH3, seed) == (1, 0xA3B198A56BAC82BB)
    assert block_checksum(b"tiercache", seed) == 0x642134EE32F5ABE8
    assert block_seed(KEY, NAMESPACE, 2 << 20, 0) == seed


def test_every_field_has_its_say() -> None:
    fields = [(KEY, KEY[::-1]), (NAMESPACE, NAMESPACE[::-1]), (4096, 4097), (0, 0x21), (1, 2)]
    seeds = {block_seed(*choice) for choice in itertools.product(*fields)}  # type: ignore[arg-type]
    assert len(seeds) == 2 ** len(fields)


# --- what a hint may say -----------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["return_in_s", "ttl_s"])
def test_a_time_is_a_positive_number(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        Hint(**{name: seconds})  # type: ignore[arg-type]


def test_what_a_hint_may_say() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        Hint(done=True, return_in_s=3)
    with pytest.raises(ValueError, match="says nothing"):
        Hint()
    with pytest.raises(ValueError, match="7 is not a valid"):
        Hint(priority=7)  # type: ignore[arg-type]
    assert Hint(ttl_s=1e300).fields() == {"done": False, "return_in_ms": 0, "ttl_ms": MAX_HINT_MS, "priority": 0}
    assert Hint(return_in_s=1e-9, priority=Priority.HIGH).fields()["return_in_ms"] == 1


# --- key files and addresses of the wrong form say what to do; keys are never overwritten ------------


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
