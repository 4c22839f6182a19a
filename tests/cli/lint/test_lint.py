"""What `tiercache lint` finds in prompts, what it says of it, and of what it says nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, assert_refused

from tiercache.cli.lint import prompts

Request = dict[str, Any]
Lint = Callable[..., list[dict[str, Any]]]


def prose(name: str, sentences: int) -> str:
    """Sentences that no other name has."""
    chosen = random.Random(name)
    words = [f"{name}{number}" for number in range(40)]
    return " ".join(f"{' '.join(chosen.choices(words, k=9)).capitalize()}." for _ in range(sentences))


RULES = prose("rule", 30)
DOCUMENTS = [prose(f"doc{number}x", 12) for number in range(5)]


def request(*messages: tuple[str, str], **fields: Any) -> Request:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}


@pytest.fixture
def lint(tmp_path: Path, run: Run) -> Lint:
    """The findings in these prompts: texts, each in a file, or requests, each in a line of one file."""

    def one(*given: str | Request) -> list[dict[str, Any]]:
        texts = [text for text in given if isinstance(text, str)]
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
        files = [tmp_path / f"{number}.txt" for number in range(len(texts))]
        if not texts:
            (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in given))
            files = [tmp_path / "requests.jsonl"]
        status, out, err = run("lint", "--json", *files)
        found: list[dict[str, Any]] = json.loads(out)["findings"]
        assert (status, err) == (1 if found else 0, "")
        return found

    return one


@pytest.mark.parametrize(
    ("kind", "line", "text"),
    [
        ("time", "Today is 2026-11-23 16:48:37.", "2026-11-23 16:48:37"),
        ("time", "It is 2026-11-23T16:48:37.123Z now.", "2026-11-23T16:48:37.123Z"),
        ("time", "Date: 23 November 2026, 16:48", "23 November 2026, 16:48"),
        ("time", "The current time is 16:48 in Oslo.", "16:48"),
        ("time", "timestamp: 1795452517", "1795452517"),
        ("time", '{"ts": 1795452517123}', "1795452517123"),
        ("date", "Current date: 2026-11-23.", "2026-11-23"),
        ("date", "Today is November 23, 2026.", "November 23, 2026"),
        ("id", "Ticket 0b8f6e9e-2f5c-4a37-9a6e-5b1d7f0c9d11.", "0b8f6e9e-2f5c-4a37-9a6e-5b1d7f0c9d11"),
        ("id", "Request ID: 8f3a99c1d2e4b5a6", "8f3a99c1d2e4b5a6"),
        ("id", "(req_011CQ8yZaB3dEf)", "req_011CQ8yZaB3dEf"),
    ],
)
def test_a_time_or_an_id_at_the_front_of_one_prompt(lint: Lint, kind: str, line: str, text: str) -> None:
    plain = f"You help people.\n{line}\n{RULES}"
    for prompt in (plain, request(("system", plain), ("user", "Hello?")), {"prompt": plain}):
        [found] = lint(prompt)
        assert (found["kind"], found["position"]) == (kind, plain.index(text))
        assert f"'{text}" in found["what"]
        assert 0 <= found["lost"] - len(RULES) < 20
        assert "put it behind everything that stays the same" in found["remedy"]


@pytest.mark.parametrize(
    "clean",
    [
        f"{RULES}\nToday is 2026-11-23 16:48:37.",
        f"{RULES}\nRequest ID: 8f3a99c1d2e4b5a6. What is new?",
        f"Your knowledge ends in 2024-06. The rules of 1 May 2021 apply; call 1795452517, open 9:00-17:00.\n{RULES}",
        f"You run bfloat16 models and message user4711 about thread-safe code, see trace collector v2.\n{RULES}",
        f"{RULES}\n{RULES}\nSent at 2026-11-23 16:48:37 with id 0b8f6e9e-2f5c-4a37-9a6e-5b1d7f0c9d11.\n{RULES}",
        request(("system", RULES), ("user", "It is 2026-11-23 16:48 here."), ("assistant", RULES), ("user", "Thanks")),
        request(("system", RULES), ("user", f"Today is 2026-11-23 16:48:37. {prose('question', 20)}")),
        {"prompt": [1, 2, 1795452517] * 100},
        "[not JSON\n" + RULES,
    ],
    ids=lambda one: str(one)[:20],
)
def test_ordinary_prompts_are_clean(lint: Lint, clean: str | Request) -> None:
    assert lint(clean) == []


def test_prompts_too_short_to_be_judged_are_not_called_clean(tmp_path: Path, run: Run) -> None:
    texts = {
        "a": "You help. It is 12:31:05. Answer in short.",
        "b": "You help. It is 12:32:17. Answer in short.",
        "c": "",
    }
    texts["d"] = json.dumps({"messages": [], "tools": [{"function": {"name": "f"}}]})
    for name, text in (texts | {"long": RULES}).items():
        (tmp_path / name).write_text(text)
    status, out, err = run("lint", *(tmp_path / name for name in texts))
    assert (status, out) == (0, "no prompt could be judged\n")
    assert "4 of 4 prompts have fewer than 128 characters: too short to be judged" in err
    status, out, err = run("lint", tmp_path / "a", tmp_path / "long")
    assert (status, out) == (0, "1 prompt: nothing found that costs a tenth of one\n")
    assert "1 of 2 prompts" in err


def test_system_messages_that_differ_by_a_time_are_one_finding(lint: Lint) -> None:
    hours = range(10, 24)
    [found] = lint(
        *(request(("system", f"Now: {hour}:15 o'clock. {RULES}"), ("user", prose(f"q{hour}", 3))) for hour in hours)
    )
    assert (found["kind"], found["part"], found["prompts"]) == ("time", "messages[0] (system)", len(hours))
    assert found["what"].startswith("the system message differs only by a time, '")
    assert found["lost"] >= 0.95 * len(RULES)


def turned(value: Any) -> Any:
    """The same with the keys the other way round."""
    return {key: turned(one) for key, one in reversed(value.items())} if isinstance(value, dict) else value


def test_tools_in_changing_order(lint: Lint) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "description": prose(name, 4), "parameters": {}}}
        for name in ("search", "read", "write")
    ]
    asked = ("system", "You help."), ("user", "Hi")
    for other, what in (
        ([tools[0], tools[2], tools[1]], "the same tools in another order"),
        ([turned(one) for one in tools], "the same tools with their keys in another order"),
    ):
        [found] = lint(request(*asked, tools=tools), request(*asked, tools=other))
        assert (found["kind"], found["what"]) == ("tools", what)
    assert lint(request(*asked, tools=tools), request(*asked, tools=tools)) == []


@pytest.mark.parametrize("number", ["", "[{}] ", "Document {}: "])
def test_documents_in_changing_order(lint: Lint, number: str) -> None:
    def prompt(order: list[int], question: str) -> Request:
        told = "\n\n".join(number.format(place) + DOCUMENTS[one] for place, one in enumerate(order))
        return request(("system", RULES), ("user", f"{told}\n\n{question}"))

    [found] = lint(prompt([0, 1, 2, 3], "Why?"), prompt([3, 1, 0], "How?"))
    assert (found["kind"], found["part"]) == ("order", "messages[1] (user)")
    assert "tiercache affinity --segments" in found["remedy"]
    assert ("numbers" in found["remedy"]) == bool(number)
    assert lint(prompt([0, 1, 2], "Why?"), prompt([0, 1, 2], "How?")) == []


def test_wrong_command_lines(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, binary, large = (tmp_path / name for name in ("lines.jsonl", "binary", "large"))
    lines.write_text(f"{json.dumps(request(('user', 'Hi')))}\n\n{{broken\n")
    binary.write_bytes(b"\xff\x00")
    large.write_bytes(b" " * 1025)
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 1 << 10)
    for arguments, words in (
        (["/nowhere"], "/nowhere cannot be read: No such file or directory"),
        ([tmp_path], f"{tmp_path} cannot be read"),
        ([lines], "lines.jsonl:3 is not a request in JSON: it needs one of messages"),
        ([binary], "binary is not text in UTF-8"),
        ([large], "give a part of it"),
        (["-", "-"], "- can be given once"),
        ([], "Missing argument"),
    ):
        assert_refused(run("lint", *arguments), words)
