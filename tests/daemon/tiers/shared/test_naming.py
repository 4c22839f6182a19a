"""`daemon/SHARED_FORMAT.md` says what the code does: names, epochs and values as a stranger would compute them."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import pytest

from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.forms.cipher import OVERHEAD_BYTES, Cipher
from tiercache.daemon.tiers.shared.naming import BUCKETS, BlockIdentity, Naming, Scope
from tiercache.daemon.tiers.shared.settings import _PERSON_OF_NAMES
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, ValueForm

TEXT = (Path(__file__).parents[4] / "daemon" / "SHARED_FORMAT.md").read_text()
K = bytes(range(32))
FINGERPRINT = "ab" * 16
KEY = bytes([7]) * 16
NOTES = [bytes([number]) * 16 for number in (1, 2, 3)]
BLOCK = bytes(range(256)) * 16


def blake2b(data: bytes, size: int, key: bytes = b"", person: bytes = b"tiercache-names") -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key, person=person).digest()


def vectors() -> dict[str, str]:
    return dict(re.findall(r"^ +vector (\w+) +(\S+)$", TEXT, re.MULTILINE))


def test_names_are_what_the_document_says() -> None:
    pytest.importorskip("cryptography")
    secret = blake2b(b"", 32, K, b"shared-names")
    epoch = blake2b(struct.pack("<3H", 16, 16, 16) + b"".join(NOTES), 16)
    bucket = int.from_bytes(blake2b(KEY, 2, secret), "little") % 64
    mark = blake2b(FINGERPRINT.encode() + epoch + KEY, 16, secret)
    assert vectors() == {"secret": secret.hex(), "epoch": epoch.hex(), "bucket": str(bucket), "mark": mark.hex()}
    assert Cipher(K).derived_key(_PERSON_OF_NAMES) == secret
    naming, scope = Naming("default", secret), Scope(FINGERPRINT, bucket)
    assert (naming.bucket(KEY), naming.epoch(NOTES), BUCKETS) == (bucket, epoch, 64)
    assert naming.mark(FINGERPRINT, epoch, KEY) == mark
    assert naming.block(scope, epoch, KEY).decode() == f"tc1:default:{FINGERPRINT}:{epoch.hex()[:8]}:{mark.hex()}"
    assert naming.identity(scope, epoch, KEY, 4096) == BlockIdentity(KEY, FINGERPRINT, epoch, mark, 4096)
    assert [name.decode() for name in naming.notes(scope)] == [
        "tc1:default:notes",
        f"tc1:default:{FINGERPRINT}:notes",
        f"tc1:default:{FINGERPRINT}:notes:{bucket}",
    ]


def test_what_a_host_may_not_read_it_cannot_name() -> None:
    scope, epoch = Scope(FINGERPRINT, 3), b"e" * 16
    names = {Naming(name, secret).block(scope, epoch, KEY) for name in ("a", "b") for secret in (b"", K, bytes(32))}
    naming = Naming("a", K)
    names |= {naming.block(scope, b"f" * 16, KEY), naming.block(Scope("cd" * 16, 3), epoch, KEY)}
    assert len(names) == 8
    marks = {name.rpartition(b":")[2] for name in names if name.startswith(b"tc1:a:")}
    assert len(marks) == 5, "each is a hash of its own"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_header_is_what_the_document_says(sealed: bool) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    form = ValueForm(Cipher(K) if sealed else None)
    whose = BlockIdentity(KEY, FINGERPRINT, b"e" * 16, b"m" * 16, len(BLOCK))
    header, body = form.pack(whose, memoryview(BLOCK), memoryview(bytearray(form.body_bytes(len(BLOCK)))))
    told = {int(offset): int(size) for offset, size in re.findall(r"^\| (\d+) \| (\d+) \|", TEXT, re.MULTILINE)}
    ends = [offset + size for offset, size in told.items()]
    assert [0, *ends[:-1]] == list(told), "without gaps"
    assert ends[-1] == len(header) == HEADER_BYTES
    fields = {offset: header[offset : offset + size] for offset, size in told.items()}
    number = {offset: int.from_bytes(value, "little") for offset, value in fields.items()}
    assert (fields[0], number[4], number[5], number[6]) == (b"tcKV", 1, 0, 0 if sealed else 1)
    assert (number[8], number[16]) == (len(BLOCK), len(BLOCK) + (OVERHEAD_BYTES if sealed else 0))
    assert (fields[32], fields[48].hex(), fields[64]) == (b"m" * 16, FINGERPRINT, b"e" * 16)
    assert number[7] == number[80] == 0
    assert (number[24] == 0) is sealed
    if sealed:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        aes = AESGCM(blake2b(header + KEY, 32, K, b"tiercache-block"))
        assert aes.decrypt(bytes(body[:12]), bytes(body[12:]), header + KEY) == BLOCK
    frame = memoryview(bytearray(len(BLOCK)))
    assert form.unpack(whose, header, memoryview(bytearray(body)), frame) is FetchOutcome.OK
    newer = header[:4] + b"\x02" + header[5:]
    assert form.unpack(whose, newer, memoryview(bytearray(body)), frame) is FetchOutcome.OTHER_VERSION
