"""What real stores give back that is not what was stored, or not at all: a miss, which the next store of it mends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import BLOCK_BYTES, KEY, HostRig, Hosts, names_of
from played import play, played
from stored import Stored, StoredInBucket

from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, ValueForm

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

BLOCKS, VICTIM = 12, 5
CHECKSUM_AT, MARK_AT, FINGERPRINT_AT = 24, 32, 48

Spoil = Callable[[bytes], bytes]


def changed(at: int, by: int = 1) -> Spoil:
    """One bit of it is another."""

    def spoil(value: bytes) -> bytes:
        place = at % len(value)
        return value[:place] + bytes([value[place] ^ by]) + value[place + 1 :]

    return spoil


BY_ITSELF: dict[str, Spoil] = {
    "a bit of the block": changed(-100),
    "its last bit": changed(-1, 0x80),
    "a bit of the header": changed(20),
    "a bit of the fingerprint": changed(FINGERPRINT_AT),
    "an older header": lambda value: value[:4] + bytes([value[4] - 1]) + value[5:],
    "a newer header": lambda value: value[:4] + bytes([value[4] + 1]) + value[5:],
    "cut by a byte": lambda value: value[:-1],
    "cut within the header": lambda value: value[: HEADER_BYTES // 2],
    "cut to the header": lambda value: value[:HEADER_BYTES],
    "empty": lambda value: b"",
    "longer by a byte": lambda value: value + b"x",
    "much longer": lambda value: value + bytes(3 << 20),
    "zeros": lambda value: bytes(len(value)),
}

OF_ANOTHER_RELEASE = ("an older header", "a newer header")
"""No fault of the store: hosts of two releases may share one."""


def with_the_body_of(other: bytes) -> Spoil:
    """All that the header says of the block is right; body and checksum belong to another one."""
    return lambda value: (
        value[:CHECKSUM_AT]
        + other[CHECKSUM_AT : CHECKSUM_AT + 8]
        + value[MARK_AT:HEADER_BYTES]
        + (other[HEADER_BYTES:])
    )


def misplaced(stored: Stored, a: HostRig, chain: bytes) -> dict[str, bytes]:
    """Values that are right elsewhere: each proves itself, but for what it stands for."""
    other_rank, other_dtype = a.namespace(tp_rank=1), a.namespace(dtype="bfloat16")
    names = names_of(a, chain)
    good, next_one = stored.value(names[VICTIM]), stored.value(names[VICTIM + 1])
    return {
        "the body of another block": with_the_body_of(next_one)(good),
        "another block of the chain": next_one,
        "another chain": stored.value(names_of(a, chain_of("y", BLOCKS))[VICTIM]),
        "another rank": stored.value(names_of(a, chain, other_rank)[VICTIM]),
        "another data type": stored.value(names_of(a, chain, other_dtype)[VICTIM]),
    }


def forged(a: HostRig, chain: bytes) -> dict[str, bytes]:
    """Values that whoever can write to the store might make: the header is right in all it says, and the checksum."""
    scope = a.shared.scope_of(a.namespace(), chain[:16])
    epoch = a.shared.epochs.of(scope)
    assert epoch is not None
    whose = a.shared.epochs.naming.identity(scope, epoch, key_of(chain, VICTIM), BLOCK_BYTES)
    made = {}
    for what, form in {"plain": ValueForm(None), "sealed with another key": ValueForm(Cipher(bytes(32)))}.items():
        scratch = memoryview(bytearray(form.body_bytes(BLOCK_BYTES)))
        made[what] = b"".join(map(bytes, form.pack(whose, memoryview(b"poison" * BLOCK_BYTES)[:BLOCK_BYTES], scratch)))
    return made


@pytest.mark.parametrize("secret", [KEY, None], ids=["sealed", "plain"])
def test_what_is_not_what_was_stored_is_a_miss(stored_in: Stored, tmp_path: Path, secret: bytes | None) -> None:
    async def scenario() -> None:
        async with Hosts(stored_in.open, tmp_path) as hosts:
            a, b = hosts.open(secret=secret), hosts.open(secret=secret)
            chain, space = chain_of("x", BLOCKS), b.namespace()
            for one in (chain, chain_of("y", BLOCKS)):
                for of in (a.namespace(), a.namespace(tp_rank=1), a.namespace(dtype="bfloat16")):
                    a.store(of, one)
            await a.sent()
            name = names_of(a, chain)[VICTIM]
            good = stored_in.value(name)
            bad = {what: spoil(good) for what, spoil in BY_ITSELF.items()} | misplaced(stored_in, a, chain)
            if secret is not None:
                bad |= forged(a, chain)
            assert good not in bad.values()
            counted = 0
            for what, value in bad.items():
                stored_in.spoil(name, value)
                assert await b.load([space], chain) == VICTIM, what
                counted += what not in OF_ANOTHER_RELEASE
                assert b.shared.source.tally.bad_blocks == counted, what
                assert await b.look_up([space], chain) == VICTIM, f"{what}: it is claimed again"
                b.store(space, chain, first=VICTIM)
                await b.sent()
                assert len(stored_in.value(name)) == len(good), f"{what}: the next store did not mend it"
                b.forget_dram()
                b.shared.presence.forget()
                assert await b.load([space], chain) == BLOCKS, what
                b.forget_dram()
                b.shared.presence.forget()

    play(scenario)


@played
async def test_a_spoilt_pack_costs_what_is_spoilt(bucket: Callable[..., StoredInBucket], tmp_path: Path) -> None:
    stored = bucket(4)
    async with Hosts(stored.open, tmp_path) as hosts:
        a, b = hosts.open(), hosts.open()
        chain, space = chain_of("x", BLOCKS), b.namespace()
        a.store(a.namespace(), chain)
        await a.sent()
        name = names_of(a, chain)[7]  # of blocks 4 to 7
        good = stored.value(name)
        record = len(good) // 4
        bad = {
            "a bit of the second block": (changed(record + 500)(good), 5),
            "the blocks in another order": (good[:record] + good[2 * record :] + good[record : 2 * record], 5),
            "cut within the last block": (good[:-1], 7),
            "cut to one block": (good[:record], 5),
            "empty": (b"", 4),
            "another pack": (stored.value(names_of(a, chain)[11]), 4),
        }
        for what, (value, found) in bad.items():
            stored.spoil(name, value)
            assert await b.load([space], chain) <= found, what
            b.forget_dram()
            b.shared.presence.forget()
        stored.spoil(name, good)
        assert await b.load([space], chain) == BLOCKS
        b.forget_dram()
        b.shared.presence.forget()
        b.store(space, chain[: 16 * 6])  # so that it fetches from the middle of a pack on
        assert await b.load([space], chain) == BLOCKS


@pytest.mark.parametrize("gone", [range(1), range(VICTIM, VICTIM + 1), range(BLOCKS), range(8, BLOCKS)])
def test_what_the_store_loses_between_look_up_and_fetch(stored_in: Stored, tmp_path: Path, gone: range) -> None:
    async def scenario() -> None:
        async with Hosts(stored_in.open, tmp_path) as hosts:
            a, b = hosts.open(), hosts.open()
            chain, space = chain_of("x", BLOCKS), b.namespace()
            a.store(a.namespace(), chain)
            await a.sent()
            assert await b.look_up([space], chain) == BLOCKS
            for name in names_of(a, chain)[gone.start : gone.stop]:
                stored_in.lose(name)
            assert await b.load([space], chain) == gone.start
            assert await b.look_up([space], chain) == gone.start, "it is claimed again"
            assert b.shared.source.tally.bad_blocks == 0
            b.store(space, chain, first=gone.start)
            await b.sent()
            a.forget_dram()
            assert await a.load([a.namespace()], chain) == BLOCKS, "the next store of it did not mend it"

    play(scenario)


@played
async def test_a_store_that_others_empty(stored_in: Stored, tmp_path: Path) -> None:
    """FLUSHALL, an emptied folder or bucket, between look-up and fetch: a miss; and what is stored then is found."""
    async with Hosts(stored_in.open, tmp_path) as hosts:
        a, b = hosts.open(), hosts.open()
        chain, space = chain_of("x", BLOCKS), b.namespace()
        a.store(a.namespace(), chain)
        await a.sent()
        old = dict(a.shared.epochs._notes)
        assert await b.look_up([space], chain) == BLOCKS
        stored_in.empty()
        assert await b.load([space], chain) == 0
        b.store(space, chain)
        await b.sent()
        a.forget_dram()
        assert await a.load([a.namespace()], chain) == BLOCKS
        assert not set(old.values()) & set(a.shared.epochs._notes.values()), "names from before are in use again"
