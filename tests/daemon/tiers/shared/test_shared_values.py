"""Values that are not what was stored, or are gone: each is a miss, and is mended by the next store."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import host, hosts_play, names_of
from memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@pytest.mark.parametrize("secret", [bytes(range(32)), None], ids=["sealed", "plain"])
@pytest.mark.parametrize("damage", ["flip", "head", "older", "newer", "short", "long", "other", "empty"])
def test_a_value_that_is_not_what_was_stored_is_a_miss(tmp_path: Path, secret: bytes | None, damage: str) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        a, b = host(store, tmp_path, "a", secret=secret), host(store, tmp_path, "b", secret=secret)
        chain = chain_of("x", 12)
        a.store(a.namespace(), chain)
        await a.sent()
        names = names_of(a, chain)
        good = dict(store.values)
        victim, other = names[5], names[6]
        value = bytearray(good[victim])
        if damage == "flip":
            value[-9] ^= 1
        elif damage == "head":
            value[20] ^= 1
        elif damage in ("older", "newer"):
            value[4] += 1 if damage == "newer" else -1
        elif damage == "short":
            del value[-1:]
        elif damage == "long":
            value += b"x"
        elif damage == "other":
            value[:] = good[other]
        else:
            value.clear()
        store.values[victim] = bytes(value)
        assert await b.load([b.namespace()], chain) == 5
        assert b.shared.source.tally.bad_blocks == 1
        # It is not claimed again at once: a client would ask for ever.
        assert await b.look_up([b.namespace()], chain) == 5
        # The next store of it replaces what is there.
        b.store(b.namespace(), chain, first=5)
        await b.sent()
        assert store.values[victim] != bytes(value)
        c = host(store, tmp_path, "c", secret=secret)
        assert await c.load([c.namespace()], chain) == 12
        for one in (a, b, c):
            one.check()
            await one.close()

    hosts_play(scenario)


@pytest.mark.parametrize("gone", [range(1), range(10, 11), range(20), range(15, 20)])
def test_what_the_store_has_lost(tmp_path: Path, gone: range) -> None:
    """Between the look-up and the fetch, as after an eviction: the run ends there, and is not claimed for a while."""

    async def scenario() -> None:
        store = MemoryStore()
        a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
        chain = chain_of("x", 20)
        a.store(a.namespace(), chain)
        await a.sent()
        space = b.namespace()
        assert await b.look_up([space], chain) == 20
        names = names_of(a, chain)
        for number in gone:
            del store.values[names[number]]
        assert await b.load([space], chain) == gone.start
        assert await b.look_up([space], chain) == gone.start
        assert b.shared.source.tally.bad_blocks == 0
        b.store(space, chain, first=gone.start)
        await b.sent()
        assert await a.load([a.namespace()], chain) == 20
        b.forget_dram()
        b.check()
        await a.close()
        await b.close()

    hosts_play(scenario)


@pytest.mark.parametrize("of", ["its own place", "the place of another"])
def test_a_value_forged_without_the_key_is_a_miss(tmp_path: Path, of: str) -> None:
    """Its checksum is right, and so is all that its header says: but it is not sealed, or sealed with another key."""

    async def scenario() -> None:
        from tiercache.daemon.tiers.forms.cipher import Cipher
        from tiercache.daemon.tiers.shared.value import BlockIdentity, ValueForm

        store = MemoryStore()
        a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
        space, chain = a.namespace(), chain_of("x", 12)
        a.store(space, chain)
        await a.sent()
        name = names_of(a, chain)[5]
        mark = bytes.fromhex(name.rpartition(b":")[2].decode())
        epoch = a.shared.epochs.of(a.shared.scope_of(space, chain[:16]))
        assert epoch is not None
        whose = BlockIdentity(key_of(chain, 5), space.fingerprint, epoch, mark, 4096)
        for form in (ValueForm(None), ValueForm(Cipher(bytes(32)))):
            scratch = memoryview(bytearray(form.body_bytes(4096)))
            store.values[name] = b"".join(map(bytes, form.pack(whose, memoryview(bytearray(4096)), scratch)))
            assert await b.load([b.namespace()], chain) == 5
            b.forget_dram()
            b.shared.presence.forget()
        if of == "the place of another":  # a value that is right elsewhere
            store.values[name] = store.values[names_of(a, chain)[4]]
            assert await b.load([b.namespace()], chain) == 5
        for one in (a, b):
            one.check()
            await one.close()

    hosts_play(scenario)
