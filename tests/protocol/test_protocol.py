"""`daemon/PROTOCOL.md` says what the code does."""

from __future__ import annotations

import re
import struct

import msgpack
from raw_client import ROOT, content_id, next_key, root_key


def _document() -> str:
    return (ROOT / "daemon" / "PROTOCOL.md").read_text()


def _section(title: str) -> str:
    return next(part for part in _document().split("\n## ") if part.startswith(title))


def _vectors() -> dict[str, bytes]:
    found = re.findall(r"^ *vector ([a-z0-9_]+) +([0-9a-f]+)$", _document(), re.MULTILINE)
    return {name: bytes.fromhex(digits) for name, digits in found}


def test_the_documented_vectors_are_what_the_code_computes() -> None:
    import msgspec

    from tiercache.protocol import messages
    from tiercache.protocol.checksums import CHECKSUM_LANES, block_checksum
    from tiercache.protocol.keys import KeyChain
    from tiercache.protocol.keys import content_id as code_content_id
    from tiercache.protocol.keys import root_key as code_root_key
    from tiercache.protocol.namespaces import NamespaceSpec

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
    import msgspec

    from tiercache.protocol import messages

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
    from tiercache.protocol.keys import KeyChain

    root, tokens = root_key("demo"), list(range(40))
    whole = KeyChain(root, 4, tokens)
    for step in (1, 3, 4, 7):
        pieces = KeyChain(root, 4)
        became_full = [pieces.extend(tokens[at : at + step]) for at in range(0, 40, step)]
        assert sum(became_full) == len(pieces) == 10
        assert pieces.packed() == whole.packed()
