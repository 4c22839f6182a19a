"""Object stores: on rclone's server of S3, and on one that answers as a test wants it to."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from s3_rig import KEY, SECRET, FakeServer
from store_calls import content, put, read, soon
from valkey_rig import Certificates, free_port
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.objects.connection import ObjectConnection
from tiercache.daemon.tiers.shared.stores.objects.store import ObjectsStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Put, StoreError, StoreProblem
from tiercache.errors import ConfigError

pytest.importorskip("obstore", reason="needs Python 3.11 or later")

NAME = b"tc1:default:5d1e:0a1b:9f"
LATE_S = 0.3
OBJECT = "prefix/values/a"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def connect() -> Iterator[Callable[[str], Connection]]:
    made: list[ObjectsStore] = []

    def make(url: str) -> Connection:
        made.append(ObjectsStore(url))
        return made[-1].connect()

    yield make
    for one in made:
        one.close()
    wait_until(lambda: "object store" not in {thread.name for thread in threading.enumerate()}, "the thread to end")
    gc.collect()


def failing(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call()
    assert "\n" not in caught.value.text
    assert SECRET not in caught.value.text
    return caught.value


def test_a_whole_answer_to_a_range_is_cut(fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    fake.ranges = False
    line = connect(fake.url())
    pack = content(7, 16_000)
    put(line, {b"a": pack, b"too long": bytes(16_001)})
    assert read(line, [b"a"], 4, 996, 5000) == [pack[5000:6000]]
    assert read(line, [b"a"], 4, 996, 5000) == [pack[5000:6000]]
    assert [wanted for method, _, wanted in fake.asked if method == "GET"] == ["bytes=5000-5999", "", ""]
    assert read(line, [b"too long"], 4, 996, 5000) == [Fate.MISFIT], "it is not a pack: nobody asks for memory for it"


def test_what_must_not_be_done_twice_is_not_tried_again(fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    """A note whose answer is lost may have been replaced by another host since, and what that flushed would be back."""
    fake.hook = lambda method, key: (500, b"") if method in ("PUT", "POST") else None
    line = connect(fake.url())
    for call in (
        lambda: line.set_note(b"n", b"note", soon()),
        lambda: line.set_note(b"m", b"note", soon(), only_if_missing=True),
        lambda: line.delete([b"n"], soon()),
        lambda: put(line, {b"value": b"v"}),
    ):
        assert failing(call).problem is StoreProblem.BUSY  # type: ignore[arg-type]
    puts = [key for method, key, _ in fake.asked if method == "PUT"]
    notes = [f"prefix/notes/{file_name(name)}" for name in (b"n", b"m")]
    assert puts == [*notes, *[f"prefix/values/{file_name(b'value')}"] * 2]


@pytest.mark.parametrize(
    ("status", "code", "problem", "words"),
    [
        (503, "SlowDown", StoreProblem.BUSY, "SlowDown: the server asks to come back later"),
        (429, "TooManyRequests", StoreProblem.BUSY, "come back later"),
        (500, "InternalError", StoreProblem.BUSY, "come back later"),
        (403, "AccessDenied", StoreProblem.DENIED, "read, write and delete"),
        (403, "RequestTimeTooSkewed", StoreProblem.DENIED, "the clock of this host or of the server is wrong"),
        (401, "", StoreProblem.DENIED, "HTTP 401"),
        (507, "", StoreProblem.FULL, "lifecycle rule"),
        (403, "QuotaExceeded", StoreProblem.FULL, "lifecycle rule"),
        (400, "AuthorizationHeaderMalformed", StoreProblem.PROTOCOL, "?region="),
        (404, "NoSuchBucket", StoreProblem.PROTOCOL, "there is no bucket bucket: make it"),
        (418, "", StoreProblem.PROTOCOL, "HTTP 418"),
    ],
)
def test_what_the_server_says_is_told_in_one_line(
    fake: FakeServer, connect: Callable[[str], Connection], status: int, code: str, problem: StoreProblem, words: str
) -> None:
    fake.hook = lambda method, key: (status, f"<Error><Code>{code}</Code></Error>".encode())
    line = connect(fake.url())
    for call in (lambda: read(line, [b"a"]), lambda: put(line, {b"a": b"value!"})):
        error = failing(call)
        assert error.problem is problem
        assert words in error.text
        assert error.text.startswith("s3://bucket/prefix: ")


def test_why_no_server_answers_is_told(tmp_path: Path, fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    certificates = Certificates(tmp_path)
    other, trusted, ca = FakeServer(certificates, "127.0.0.2"), FakeServer(certificates), f"&ca={certificates.ca}"
    plain = re.sub("http:", "https:", fake.url())
    cases = (
        (f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}", "Connection refused: see that the server runs"),
        ("s3://bucket?endpoint=http://nowhere.invalid:9", "failed to lookup address information"),
        (trusted.url(), "its certificate is of a CA that this host does not trust: name its CA in the URL (?ca="),
        (other.url(ca), "its certificate is for localhost, 127.0.0.1: write that name into"),
        (plain, "the server does not speak TLS there: write http://"),
    )
    for url, words in cases:
        line = connect(url)
        error = failing(partial(read, line, [b"a"]))
        assert error.problem is StoreProblem.UNREACHABLE
        assert words in error.text, error.text
        assert failing(partial(read, line, [b"a"])).text == error.text, "no duration and no key"
    assert put(connect(trusted.url(ca)), {b"a": b"value!"}) == [Fate.DONE]
    for server in (other, trusted):
        server.end()
    for bad in ("/nowhere", str(certificates.key)):
        with pytest.raises(ConfigError, match=f"ca = {bad}: .*: name a file of the CA that signed"):
            ObjectsStore(f"s3://bucket?ca={bad}")


def test_a_deletion_goes_on_after_what_is_missing(fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    """Where a server ends at it."""

    def hook(method: str, keys: str) -> tuple[int, bytes] | None:
        missing = method == "POST" and not fake.objects.keys() >= set(keys.split())
        return (404, b"<Error><Code>NoSuchKey</Code></Error>") if missing else None

    line, fake.hook = connect(fake.url()), hook
    put(line, {b"a": b"value!", b"b": b"value!", b"c": b"value!"})
    line.delete([b"a", b"no", b"b"], soon())
    assert read(line, [b"a", b"b", b"c"]) == [Fate.MISSING, Fate.MISSING, b"value!"]
    fake.hook = lambda method, keys: hook(method, keys) if " " in keys else (403, b"")
    assert failing(lambda: line.delete([b"no", b"c"], soon())).problem is StoreProblem.DENIED


def test_a_value_too_long_for_the_server_is_refused_alone(
    fake: FakeServer, connect: Callable[[str], Connection]
) -> None:
    too_long = (400, b"<Error><Code>EntityTooLarge</Code></Error>")
    fake.hook = lambda method, key: too_long if method == "PUT" and key == OBJECT else None
    assert put(connect(fake.url()), {b"a": b"value!", b"b": b"value!"}) == [Fate.REFUSED, Fate.DONE]


def test_a_length_beyond_all_room_is_not_read(fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    fake.gate.clear()  # the rest of the object never comes
    fake.objects[OBJECT] = bytes(10 << 20)
    fake.objects["prefix/notes/n"] = bytes(10 << 20)
    line = connect(fake.url())
    assert read(line, [b"a"], 5, 1000) == [Fate.MISFIT]
    assert line.exists([], [b"n"], soon()).notes == [None]


def test_a_body_longer_than_it_says_is_not_read_to_its_end(
    fake: FakeServer, connect: Callable[[str], Connection]
) -> None:
    """As an endless one would fill the memory."""
    line, pack = connect(fake.url()), content(7, 10_000)
    put(line, {b"a": pack})
    fake.excess = bytes(64 << 20)
    assert read(line, [b"a"], 4, 96, 5000) == [Fate.MISFIT]
    wait_until(lambda: fake.cut, "the server to notice")
    fake.excess = b""
    assert read(line, [b"a"], 4, 96, 5000) == [pack[5000:5100]]


@pytest.mark.stress
def test_parts_may_change_after_a_late_put(fake: FakeServer, connect: Callable[[str], Connection]) -> None:
    """From its deadline on they are the caller's again: what is still sent is a copy."""
    arrived, go = threading.Event(), threading.Event()

    def wait(method: str, key: str) -> None:
        arrived.set()
        go.wait(60)

    fake.hook = wait  # type: ignore[assignment]
    line = connect(fake.url())
    parts = [memoryview(bytearray(content(number, 300_000))) for number in range(12)]
    puts = [Put(b"%d" % number, [b"head!", part]) for number, part in enumerate(parts)]
    while not arrived.is_set():  # a busy machine may not come so far within the time
        assert failing(lambda: line.put(puts, [], time.monotonic() + LATE_S)).problem is StoreProblem.TIMEOUT
    for part in parts:
        part[:] = b"x" * len(part)
    go.set()
    line.exists([b"a"], [], soon())
    assert all(b"x" * 1000 not in value for value in fake.objects.values())


def test_a_closed_store_ends_its_calls(fake: FakeServer) -> None:
    fake.gate.clear()
    fake.objects[OBJECT] = content(9, 9000)
    store = ObjectsStore(fake.url())
    line = store.connect()
    raised: list[StoreError] = []

    def wait() -> None:
        raised.append(failing(lambda: read(line, [b"a"], 5, 9000)))

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: fake.asked, "the request")
    store.close()
    waiter.join()
    assert raised[0].problem is StoreProblem.UNREACHABLE
    assert failing(lambda: read(line, [b"a"])).problem is StoreProblem.UNREACHABLE


ROOT = Path(__file__).resolve().parents[6]


def test_the_documented_lifecycle_rule_is_for_values_and_not_for_notes() -> None:
    """A bucket that drops the notes of flushes makes all hosts start empty."""
    text = (ROOT / "daemon" / "OPERATING.md").read_text()
    [rules] = re.findall(r"--lifecycle-configuration '(.*?)'", text, re.DOTALL)
    [rule] = json.loads(rules)["Rules"]
    prefix = rule["Filter"]["Prefix"]
    assert f"prefix/{ObjectConnection._value(b'tc1:block')}".startswith(prefix)
    assert not f"prefix/{ObjectConnection._note(b'tc1:notes')}".startswith(prefix)
    assert rule["Expiration"]["Days"] > 0
