"""Values that are not what was stored are found out; and `daemon/SHARED_FORMAT.md` says what the code does."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import KEY, host, names_of
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import OVERHEAD_BYTES, Cipher
from tiercache.daemon.tiers.shared.access import StoreAccess
from tiercache.daemon.tiers.shared.naming import BUCKETS, BlockIdentity, Naming, Scope
from tiercache.daemon.tiers.shared.settings import _PERSON_OF_NAMES
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, ValueForm, announced_bytes, pack_of

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

BLOCKS = 12
CHAIN = chain_of("x", BLOCKS)
BLOCK = b"abcd" * 1024
WHOSE = BlockIdentity(bytes(16), "ab" * 16, b"e" * 16, b"m" * 16, len(BLOCK))
OTHERS = {
    "key": WHOSE._replace(key=b"k" * 16),
    "namespace": WHOSE._replace(fingerprint="cd" * 16),
    "epoch": WHOSE._replace(epoch=b"f" * 16),
    "name": WHOSE._replace(mark=b"n" * 16),
}
FORMS = [(sealed, codec) for sealed in (True, False) for codec in ("raw", "zstd")]

Spoil = Callable[[bytes], bytes]


def changed(at: int, by: int = 1) -> Spoil:
    """One bit of it is another."""

    def spoil(value: bytes) -> bytes:
        place = at % len(value)
        return value[:place] + bytes([value[place] ^ by]) + value[place + 1 :]

    return spoil


SPOILT: dict[str, Spoil] = {
    "a bit of the block": changed(-10),
    "its last bit": changed(-1, 0x80),
    "no header": changed(0),
    **{f"byte {at}": changed(at) for at in (5, 6, 8, 16, 24, 32, 48, 64)},  # of each field
    "a sealed codec": changed(5, codecs.SEALED),
    "cut by a byte": lambda value: value[:-1],
    "cut to the header": lambda value: value[:HEADER_BYTES],
    "longer by a byte": lambda value: value + b"x",
    "zeros": lambda value: bytes(len(value)),
}


def form_of(sealed: bool, codec: str = "raw", key: bytes = KEY) -> ValueForm:
    return ValueForm(Cipher(key) if sealed else None, codecs.codec_number(codec))


def value_of(form: ValueForm, whose: BlockIdentity = WHOSE, block: bytes = BLOCK) -> bytes:
    room = memoryview(bytearray(form.body_bytes(len(BLOCK))))
    return b"".join(map(bytes, form.pack(whose, memoryview(block), room)))


def proved(form: ValueForm, value: bytes) -> FetchOutcome:
    """What the form says of a value; where it is good, the block is."""
    frame = memoryview(bytearray(len(BLOCK)))
    outcome = form.unpack(WHOSE, value[:HEADER_BYTES], memoryview(bytearray(value[HEADER_BYTES:])), frame)
    assert outcome is not FetchOutcome.OK or bytes(frame) == BLOCK
    return outcome


@pytest.mark.parametrize(("sealed", "codec"), FORMS)
def test_only_what_was_stored_is_good(monkeypatch: pytest.MonkeyPatch, sealed: bool, codec: str) -> None:
    monkeypatch.setattr(codecs, "_PAGE_BYTES", 64)  # rule: these blocks are small
    form = form_of(sealed, codec)
    good = value_of(form)
    assert proved(form, good) is FetchOutcome.OK
    assert announced_bytes(good[:HEADER_BYTES]) == len(good) - HEADER_BYTES
    assert announced_bytes(good[: HEADER_BYTES - 1]) == announced_bytes(bytes(HEADER_BYTES)) == 0
    bad = {what: spoil(good) for what, spoil in SPOILT.items()}
    bad |= {f"another {what}": value_of(form, other) for what, other in OTHERS.items()}
    bad["the body of another block"] = good[:HEADER_BYTES] + value_of(form, OTHERS["key"], BLOCK[::-1])[HEADER_BYTES:]
    bad["of the other kind"] = value_of(form_of(not sealed, codec))
    if sealed:
        bad["sealed with another key"] = value_of(form_of(sealed, codec, bytes(32)))
    assert [what for what, value in bad.items() if proved(form, value) is not FetchOutcome.CORRUPT] == []
    for by in (1, 2, 3):  # hosts of several releases may share a store
        assert proved(form, changed(4, by)(good)) is FetchOutcome.OTHER_VERSION


@played
async def test_a_bad_value_is_a_miss_until_the_next_store_replaces_it(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), CHAIN)
    await a.sent()
    name, space = names_of(a, CHAIN)[5], b.namespace()
    good = store.values[name]
    told = {"a bit": (changed(-1), (1, 0)), "none": (lambda value: b"", (2, 0)), "newer": (changed(4, 3), (2, 1))}
    for what, (spoil, counted) in told.items():
        store.values[name] = spoil(good)
        assert await b.load([space], CHAIN) == 5, what
        stats = b.shared.stats()
        assert (stats["bad_blocks"], stats["other_version_blocks"]) == counted, what
        assert await b.look_up([space], CHAIN) == 5, f"{what}: it is claimed again"
        b.store(space, CHAIN, first=5)
        await b.sent()
        b.forget_dram()
        b.shared.access.presence.forget()
        assert await b.load([space], CHAIN) == BLOCKS, f"{what}: the next store did not replace it"
        assert b.shared.access.presence.has(space, key_of(CHAIN, 5)), "what was fetched is not sent"
        b.forget_dram()
        b.shared.access.presence.forget()
    for one in (a, b):
        one.check_end()
        await one.close()


@played
async def test_a_spoilt_pack_costs_what_is_spoilt(tmp_path: Path) -> None:
    store = MemoryStore(pack_blocks=4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), CHAIN)
    await a.sent()
    name = names_of(a, CHAIN)[7]  # of blocks 4 to 7
    good = store.values[name]
    record = len(good) // 4
    bad = {
        "a bit of the second block": (changed(record + 500)(good), 5),
        "the blocks in another order": (good[:record] + good[2 * record :] + good[record : 2 * record], 5),
        "cut within the last block": (good[:-1], 7),
        "cut to one block": (good[:record], 5),
        "empty": (b"", 4),
        "another pack": (store.values[names_of(a, CHAIN)[11]], 4),
        "good": (good, BLOCKS),
    }
    for what, (value, found) in bad.items():
        store.values[name] = value
        assert await b.load([b.namespace()], CHAIN) <= found, what
        b.forget_dram()
        b.shared.access.presence.forget()
    read = list[str]()
    store.before = read.append
    assert await b.load([b.namespace()], CHAIN) == BLOCKS
    assert read.count("value") == BLOCKS // 4, "each pack is read at once"
    for one in (a, b):
        await one.close()


@played
async def test_packs_of_which_none_is_a_multiple_of_the_other_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ?pack=12 and blocks of 3 MiB and 6 MiB."""
    monkeypatch.setattr(StoreAccess, "pack_of", lambda access, namespace: (6, 4)[namespace.spec.tp_rank])
    store = MemoryStore(12)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    for rank in range(2):
        a.store(a.namespace(tp_rank=rank), CHAIN)
    await a.sent()
    assert await b.load([b.namespace(tp_rank=rank) for rank in range(2)], CHAIN) == BLOCKS
    for one in (a, b):
        one.check_end()
        await one.close()


@pytest.mark.parametrize(
    ("block_bytes", "most", "blocks"),
    [
        (4096, 16, 16),
        (2 << 20, 16, 16),
        (3 << 20, 16, 8),
        (8 << 20, 16, 4),
        (64 << 20, 16, 1),
        (8 << 20, 6, 3),
        (1, 1, 1),
    ],
)
def test_packs_are_limited_by_bytes_and_end_where_the_largest_ones_do(block_bytes: int, most: int, blocks: int) -> None:
    """A look-up in several namespaces probes where packs of all of them end."""
    assert pack_of(block_bytes, most) == blocks
    assert most % blocks == 0


# --- names, epochs and headers as a stranger would compute them --------------------------------------


TEXT = (Path(__file__).parents[4] / "daemon" / "SHARED_FORMAT.md").read_text()
FINGERPRINT = "ab" * 16
NAMED = bytes([7]) * 16
NOTES = [bytes([number]) * 16 for number in (1, 2, 3)]
PLAIN = bytes(range(256)) * 16


def blake2b(data: bytes, size: int, key: bytes = b"", person: bytes = b"tiercache-names") -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key, person=person).digest()


def vectors() -> dict[str, str]:
    return dict(re.findall(r"^ +vector (\w+) +(\S+)$", TEXT, re.MULTILINE))


def test_names_are_what_the_document_says() -> None:
    pytest.importorskip("cryptography")
    secret = blake2b(b"", 32, KEY, b"shared-names")
    epoch = blake2b(struct.pack("<3H", 16, 16, 16) + b"".join(NOTES), 16)
    bucket = int.from_bytes(blake2b(NAMED, 2, secret), "little") % 64
    mark = blake2b(FINGERPRINT.encode() + epoch + NAMED, 16, secret)
    assert vectors() == {"secret": secret.hex(), "epoch": epoch.hex(), "bucket": str(bucket), "mark": mark.hex()}
    assert Cipher(KEY).derived_key(_PERSON_OF_NAMES) == secret
    naming, scope = Naming("default", secret), Scope(FINGERPRINT, bucket)
    assert (naming.bucket(NAMED), naming.epoch(NOTES), BUCKETS) == (bucket, epoch, 64)
    assert naming.mark(FINGERPRINT, epoch, NAMED) == mark
    assert naming.block(scope, epoch, NAMED).decode() == f"tc1:default:{FINGERPRINT}:{epoch.hex()[:8]}:{mark.hex()}"
    assert naming.identity(scope, epoch, NAMED, 4096) == BlockIdentity(NAMED, FINGERPRINT, epoch, mark, 4096)
    assert [name.decode() for name in naming.notes(scope)] == [
        "tc1:default:notes",
        f"tc1:default:{FINGERPRINT}:notes",
        f"tc1:default:{FINGERPRINT}:notes:{bucket}",
    ]


def test_what_a_host_may_not_read_it_cannot_name() -> None:
    scope, epoch = Scope(FINGERPRINT, 3), b"e" * 16
    names = {Naming(name, secret).block(scope, epoch, NAMED) for name in ("a", "b") for secret in (b"", KEY, bytes(32))}
    naming = Naming("a", KEY)
    names |= {naming.block(scope, b"f" * 16, NAMED), naming.block(Scope("cd" * 16, 3), epoch, NAMED)}
    assert len(names) == 8
    marks = {name.rpartition(b":")[2] for name in names if name.startswith(b"tc1:a:")}
    assert len(marks) == 5, "each is a hash of its own"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_header_is_what_the_document_says(sealed: bool) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    form = ValueForm(Cipher(KEY) if sealed else None)
    whose = BlockIdentity(NAMED, FINGERPRINT, b"e" * 16, b"m" * 16, len(PLAIN))
    header, body = form.pack(whose, memoryview(PLAIN), memoryview(bytearray(form.body_bytes(len(PLAIN)))))
    told = {int(offset): int(size) for offset, size in re.findall(r"^\| (\d+) \| (\d+) \|", TEXT, re.MULTILINE)}
    ends = [offset + size for offset, size in told.items()]
    assert [0, *ends[:-1]] == list(told), "without gaps"
    assert ends[-1] == len(header) == HEADER_BYTES
    fields = {offset: header[offset : offset + size] for offset, size in told.items()}
    number = {offset: int.from_bytes(value, "little") for offset, value in fields.items()}
    assert (fields[0], number[4], number[5], number[6]) == (b"tcKV", 1, 0, 0 if sealed else 1)
    assert (number[8], number[16]) == (len(PLAIN), len(PLAIN) + (OVERHEAD_BYTES if sealed else 0))
    assert (fields[32], fields[48].hex(), fields[64]) == (b"m" * 16, FINGERPRINT, b"e" * 16)
    assert number[7] == number[80] == 0
    assert (number[24] == 0) is sealed
    if sealed:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        aes = AESGCM(blake2b(header + NAMED, 32, KEY, b"tiercache-block"))
        assert aes.decrypt(bytes(body[:12]), bytes(body[12:]), header + NAMED) == PLAIN
    frame = memoryview(bytearray(len(PLAIN)))
    assert form.unpack(whose, header, memoryview(bytearray(body)), frame) is FetchOutcome.OK
    newer = header[:4] + b"\x02" + header[5:]
    assert form.unpack(whose, newer, memoryview(bytearray(body)), frame) is FetchOutcome.OTHER_VERSION
