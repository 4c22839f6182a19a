"""Calls by way of a helper process, to a folder and to a store that obeys: what goes in comes out."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
from helper_rig import Make
from store_calls import content, put, read, room, soon
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.helper import lines, messages
from tiercache.daemon.tiers.shared.stores.store import Fate, Put, StoreError, StoreProblem


def test_a_folder_is_used_through_its_helper(make: Make, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o2777)
    store, other = make(f"file://{tmp_path}/kv"), make(f"file://{tmp_path}/kv")
    here, there = store.connect(), other.connect()
    values = {b"tc1:%d" % number: content(number, length) for number, length in enumerate((0, 9, 4096, 70_000, 9, 9))}
    values |= {b"many:%d" % number: content(number, 5000 + number) for number in range(40)}
    assert set(put(here, values, head_bytes=0)) == {Fate.DONE}
    assert read(there, list(values), 0) == list(values.values())
    assert read(there, [b"tc1:3"], 7, 20, offset=4096) == [values[b"tc1:3"][4096 : 4096 + 27]]
    assert read(there, [b"tc1:0", b"never", b"tc1:3"], 5, 100) == [Fate.MISFIT, Fate.MISSING, Fate.MISFIT]
    assert there.exists([*values, b"never"], [], soon()).there == [True] * len(values) + [False]
    assert here.set_note(b"epoch", b"7", soon(), only_if_missing=True) == b"7"
    notes = [b"epoch", *(b"%d" % number for number in range(40))]
    wanted = [b"7", *[None] * 40]
    assert (
        there.exists([], notes, soon()).notes == there.get([], notes, soon()) == there.put([], notes, soon()) == wanted
    )
    assert there.get([room(b"tc1:1", 1, 9)], notes, soon()) == wanted
    files = [path for path in (tmp_path / "kv" / "tiercache-1" / "values").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666}, "as the folder allows, without a mask"
    told: list[object] = []
    gets = [room(b"tc1:1", 1, 9) for _ in range(20)]
    assert there.get(gets, [b"epoch"], soon(), lambda _: told.append(b"value"), told.extend) == [b"7"]
    assert told == [b"7"] + [b"value"] * 20
    for few in (notes, []):
        told.clear()
        there.get(gets, few, soon(), lambda _: told.append(b"value"), told.append)  # type: ignore[arg-type]
        assert told == [wanted if few else []] + [b"value"] * 20
        told.clear()
        there.get([], few, soon(), None, told.append)  # type: ignore[arg-type]
        assert told == [wanted if few else []]
    there.delete(list(values), soon())
    assert not any(here.exists(list(values), [], soon()).there)


def test_more_names_than_one_message_holds_keep_their_order(make: Make) -> None:
    line = make().connect()
    names = [b"%06d" % number + b"x" * 200 for number in range(1000)]
    assert sum(map(len, names)) > messages.MAX_MESSAGE_BYTES
    put(line, dict.fromkeys(names[::7], b"value!"))
    there = line.exists(names, [b"note"], soon())
    assert there == ([number % 7 == 0 for number in range(1000)], [None])
    line.delete(names[::7], soon())
    assert not any(line.exists(names, [], soon()).there)


def test_the_staging_buffer_grows_and_stays_bounded(make: Make) -> None:
    line = make().connect()
    sizes = [10, 100_000, 3 << 20, 20 << 20]
    for number, size in enumerate(sizes):
        put(line, {b"%d" % number: content(number, size)})
        its = line._line
        assert its is not None
        assert its.slot_bytes >= size
        assert its.slots * its.slot_bytes <= max(lines.STAGING_BYTES, lines.MIN_SLOTS * (size + (64 << 10)))
    got = read(line, [b"%d" % number for number in range(4)], 5, 20 << 20)
    assert got == [content(number, size) for number, size in enumerate(sizes)]


def test_a_value_of_more_parts_than_a_system_call_takes(make: Make) -> None:
    line = make().connect()
    one = Put(b"parts", [bytes([number % 256]) * 3 for number in range(3000)])
    line.put([one], [], soon())
    assert read(line, [b"parts"]) == [b"".join(one.parts)]


def test_an_error_of_the_store_comes_back_and_the_line_is_used_again(make: Make) -> None:
    line = make().connect()
    values = [Put(b"%d" % number, [b"value!"]) for number in range(3)]
    values[2:2] = [Put(b"full", [b"value!"])]
    values += [Put(b"later%d" % number, [b"value!"]) for number in range(40)]
    with pytest.raises(StoreError, match="there is no room: make some") as caught:
        line.put(values, [], soon())
    assert caught.value.problem is StoreProblem.FULL
    assert [one.fate for one in values[:3]] == [Fate.DONE, Fate.DONE, Fate.UNKNOWN]
    assert values[-1].fate is Fate.UNKNOWN
    first = line._line
    assert read(line, [b"0"]) == [b"value!"]
    assert line._line is first


def test_a_defect_of_the_store_is_an_error_of_the_call(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    line = make().connect()
    with caplog.at_level(logging.INFO, "tiercache.daemon"), pytest.raises(StoreError, match="ValueError: a defect"):
        read(line, [b"a", b"defect", b"b"])
    wait_until(lambda: "a call of the store failed" in caplog.text, "the log of the helper process")
    assert line.exists([b"a"], [], soon()).there == [False]


def test_an_error_in_arrived_costs_the_line_and_no_more(make: Make) -> None:
    line = make().connect()
    put(line, {b"%d" % number: b"value!" for number in range(20)})
    with pytest.raises(ZeroDivisionError):
        line.get([room(b"%d" % number, 1, 9) for number in range(20)], [], soon(), lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    assert read(line, [b"3"]) == [b"value!"]


@pytest.mark.parametrize("length", [3, 16, 1 << 40])
def test_an_answer_that_cannot_be_true_is_a_misfit(make: Make, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A process that has gone mad may say that it has read more than there is room for, or less than the head."""
    line = make().connect()
    put(line, {b"a": b"0123456789"})
    real = messages.decode_answered

    def mad(packet: bytes) -> messages.Answered:
        answer: messages.Answered = real(packet)
        if isinstance(answer, messages.Settled):
            return messages.Settled(answer.slot, answer.fate, length)
        return answer

    monkeypatch.setattr(messages, "decode_answered", mad)
    assert read(line, [b"a"], 5, 10) == [Fate.MISFIT]
