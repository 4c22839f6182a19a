"""`daemon/PROTOCOL.md` says what the code does; keys, checksums and hints are what they should be."""

from __future__ import annotations

import itertools
import math
import re
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from raw_client import ROOT, content_id, next_key, root_key

from tiercache.connector.connector import check_keys
from tiercache.protocol import messages
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3, block_checksum, block_seed
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
