"""What `tiercache lint` finds in prompts, what it says of it, and of what it says nothing."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercache.cli.lint import command, prompts
from tiercache.cli.main import main

Lint = Callable[..., list[dict[str, Any]]]
Message = dict[str, Any]


def prose(name: str, sentences: int) -> str:
    """Sentences that no other name has."""
    chosen = random.Random(name)
    words = [f"{name}{number}" for number in range(40)]
    return " ".join(f"{' '.join(chosen.choices(words, k=9)).capitalize()}." for _ in range(sentences))


RULES = prose("rule", 30)
DOCUMENTS = [prose(f"doc{number}x", 12) for number in range(5)]


def request(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}


@pytest.fixture
def lint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Lint:
    """The findings in these prompts: texts, each in a file, or requests, each in a line of one file."""

    def one(*given: str | dict[str, Any]) -> list[dict[str, Any]]:
        texts = [text for text in given if isinstance(text, str)]
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
        files = [str(tmp_path / f"{number}.txt") for number in range(len(texts))]
        if not texts:
            (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in given))
            files = [str(tmp_path / "requests.jsonl")]
        status = main(["lint", "--json", *files])
        out, err = capsys.readouterr()
        found: list[dict[str, Any]] = json.loads(out)["findings"]
        assert (status, err) == (1 if found else 0, "")
        return found

    return one


FIRST = [
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
]


@pytest.mark.parametrize(("kind", "line", "text"), FIRST)
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
        "Today is 2026-11-23 16:48:37.",
        f"{RULES}\n{RULES}\nSent at 2026-11-23 16:48:37 with id 0b8f6e9e-2f5c-4a37-9a6e-5b1d7f0c9d11.\n{RULES}",
        request(("system", RULES), ("user", "It is 2026-11-23 16:48 here."), ("assistant", RULES), ("user", "Thanks")),
        request(("system", RULES), ("user", f"Today is 2026-11-23 16:48:37. {prose('question', 20)}")),
        {"prompt": [1, 2, 1795452517] * 100},
        {"messages": []} | {"tools": [{"function": {"name": "f"}}]},
        "",
        "[not JSON\n" + RULES,
    ],
    ids=lambda one: str(one)[:20],
)
def test_ordinary_prompts_are_clean(lint: Lint, clean: str | dict[str, Any]) -> None:
    assert lint(clean) == []


def test_what_all_prompts_have_is_no_time_of_each(lint: Lint) -> None:
    fixed = f"As of today, 2026-11-23 16:48, these rules apply. {RULES}"
    assert lint(f"{fixed}\nfirst question", f"{fixed}\nanother one") == []


def test_a_system_message_that_differs_by_a_time(lint: Lint) -> None:
    ask = [
        request(("system", f"Now: {hour}:15 o'clock. {RULES}"), ("user", prose(f"q{hour}", 3))) for hour in (10, 11, 12)
    ]
    [found] = lint(*ask)
    assert found["prompt"].rpartition(":")[2] > found["other"].rpartition(":")[2]
    assert (found["kind"], found["part"], found["prompts"]) == ("time", "messages[0] (system)", 3)
    assert found["what"].startswith("the system message differs only by a time, '1")
    assert ":15' here, '10:15' in " in found["what"]
    assert found["position"] == len("Now: 1")
    assert found["lost"] >= 0.95 * len(RULES)


def test_a_name_in_the_middle_of_what_is_the_same(lint: Lint) -> None:
    texts = [f"You work for {name}.\n\n{RULES}\n\n{DOCUMENTS[0]}" for name in ("Ada", "Grace Hopper")]
    [found] = lint(*texts)
    assert found["kind"] == "text"
    assert "'Grace Hopper' here, 'Ada' in " in found["what"]
    assert found["remedy"] == "put what changes behind what stays the same"
    assert (found["position"], found["total"]) == (len("You work for "), len(texts[1]))


def test_a_question_before_the_documents(lint: Lint) -> None:
    [found] = lint(*(f"{prose(name, 2)}\n\n{DOCUMENTS[0]}\n\n{DOCUMENTS[1]}" for name in ("why", "how")))
    assert found["kind"] == "text"
    assert found["lost"] > 0.8 * found["total"]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": prose(name, 4), "parameters": {}, **more}}


def turned(value: Any) -> Any:
    """The same with the keys the other way round."""
    return {key: turned(one) for key, one in reversed(value.items())} if isinstance(value, dict) else value


def test_tools_in_changing_order(lint: Lint) -> None:
    tools = [tool("search"), tool("read"), tool("write")]
    asked = ("system", "You help."), ("user", "Hi")
    [found] = lint(request(*asked, tools=tools), request(*asked, tools=[tools[0], tools[2], tools[1]]))
    assert (found["kind"], found["what"]) == ("tools", "the same tools in another order")
    assert found["part"] == "tools[1]"
    [found] = lint(request(*asked, tools=tools), request(*asked, tools=[turned(one) for one in tools]))
    assert (found["kind"], found["what"]) == ("tools", "the same tools with their keys in another order")
    assert lint(request(*asked, tools=tools), request(*asked, tools=tools)) == []


def test_json_in_texts(lint: Lint) -> None:
    record = {f"field{number}": prose(f"field{number}", 2) for number in range(6)}
    texts = json.dumps(record), json.dumps(record, indent=2), json.dumps(turned(record))
    for second, kind in ((texts[1], "whitespace"), (texts[2], "keys")):
        [found] = lint(f"{RULES}\n{texts[0]}\nWho?", f"{RULES}\n{second}\nWhere?")
        assert found["kind"] == kind
    other = json.dumps({**record, "field1": "x"})
    [found] = lint(f"{RULES}\n{texts[0]}\nWho?", f"{RULES}\n{other}\nWhere?")
    assert found["kind"] == "text"


@pytest.mark.parametrize("number", ["", "[{}] ", "Document {}: "])
def test_documents_in_changing_order(lint: Lint, number: str) -> None:
    def prompt(order: list[int], question: str) -> dict[str, Any]:
        told = "\n\n".join(number.format(place) + DOCUMENTS[one] for place, one in enumerate(order))
        return request(("system", RULES), ("user", f"{told}\n\n{question}"))

    [found] = lint(prompt([0, 1, 2, 3], "Why?"), prompt([3, 1, 0], "How?"))
    assert (found["kind"], found["part"]) == ("order", "messages[1] (user)")
    assert "tiercache affinity --segments" in found["remedy"]
    assert ("numbers" in found["remedy"]) == bool(number)
    assert lint(prompt([0, 1, 2], "Why?"), prompt([0, 1, 2], "How?")) == []


def test_other_documents_before_the_same_ones(lint: Lint) -> None:
    told = ["\n\n".join(DOCUMENTS[one] for one in order) for order in ([0, 1, 2], [3, 0, 4])]
    [found] = lint(*(f"{RULES}\n\n{one}\n\nWhat is new?" for one in told))
    assert (found["kind"], found["what"]) == ("order", "the same documents behind other ones")


def test_conversations_and_unrelated_prompts_are_clean(lint: Lint) -> None:
    turns = [("system", RULES)]
    asked = []
    for number in range(4):
        turns += [("user", prose(f"asked{number}", 3)), ("assistant", prose(f"told{number}", 8))]
        asked.append(request(*turns, ("user", f"It is 10:{number + 10} today.")))
    others = [request(("system", RULES), ("user", prose(f"other{number}", 10))) for number in range(3)]
    assert lint(*asked, *others) == []
    assert lint(*DOCUMENTS) == []


def test_many_prompts_with_one_cause_are_one_finding(lint: Lint) -> None:
    asked = [request(("system", f"Now: {minute}:15 o'clock. {RULES}"), ("user", "Hi")) for minute in range(10, 24)]
    [found] = lint(*asked)
    assert found["prompts"] == 14


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> tuple[str, str]:
    assert main(["lint", *arguments]) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_lines_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = f"Request ID: 8f3a99c1d2e4b5a6\x1b[2J\n{RULES}", RULES
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    out, _ = told(capsys, str(tmp_path / "0.txt"), status=1)
    assert out == (
        f"{tmp_path}/0.txt: character 12: an id that looks new in each request, '8f3a99c1d2e4b5a6': "
        f"{len(texts[0]) - 28:,} of {len(texts[0]):,} characters (99%) cannot be reused; "
        "leave it out, or put it behind everything that stays the same\n"
    )
    out, _ = told(capsys, str(tmp_path / "1.txt"), status=0)
    assert out == "1 prompt: nothing found that costs a tenth of one\n"


def test_forms_of_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = f"Now: 16:48 o'clock. {RULES}"
    asked = request(("system", bad), ("user", "Hi"))
    parts = request(("user", "x"))
    parts["messages"][0]["content"] = [{"type": "text", "text": bad}, {"type": "image_url", "image_url": {"url": "u"}}]
    forms = [asked, asked["messages"], {"custom_id": "1", "method": "POST", "body": asked}, [asked], parts]
    forms += [{"prompt": ["Hi", bad]}, {"input": bad}]
    for form in forms:
        text = json.dumps(form, indent=2)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        out, _ = told(capsys, "-", status=1)
        assert out.startswith("stdin")
        assert "a time that looks new in each request, '16:48'" in out


def test_wrong_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f"{json.dumps(request(('user', 'Hi')))}\n\n{{broken\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 1 << 10)
    (tmp_path / "large").write_bytes(b" " * 1025)
    for arguments, words in (
        (["/nowhere"], "/nowhere cannot be read: No such file or directory"),
        ([str(tmp_path)], f"{tmp_path} cannot be read"),
        ([str(lines)], "lines.jsonl:3 is no request in JSON: it needs one of messages"),
        ([str(binary)], "binary is no text in UTF-8"),
        ([str(tmp_path / "large")], "give a part of it"),
        (["-", "-"], "- can be given once"),
        (["--model", "/nowhere", str(binary)], "binary is no text in UTF-8"),
        ([], "Missing argument"),
    ):
        _, err = told(capsys, *arguments, status=2)
        assert words in err
        assert err.count("\n") == 1


def test_large_inputs_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limits in (
        (prompts, {"MAX_CHARS": 50_000}),
        (command, {"MAX_CHARS": 50_000, "MAX_PROMPTS": 3, "MAX_ALL_CHARS": 120_000}),
    ):
        for name, value in limits.items():
            monkeypatch.setattr(module, name, value)
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "long.txt").write_text("{" * 90_000)
    (tmp_path / "other.txt").write_text("{" * 45_000 + "x" * 45_000)
    lines = tmp_path / "many.jsonl"
    lines.write_text(f"{json.dumps(request(('user', 'Hi')))}\n" * 5)
    names = [str(tmp_path / name) for name in ("nested.json", "long.txt", "other.txt")]
    _, err = told(capsys, *names, status=0)
    assert "only the first 2 of 3 prompts are looked at" in err
    assert "only the first 50,000 characters of a prompt are looked at" in err
    _, err = told(capsys, str(lines), status=0)
    assert "only the first 3 of 5 prompts" in err


@pytest.mark.parametrize(
    "text",
    [
        "nonce-" * 60_000,
        "request id: " + "run-" * 60_000,
        json.dumps(request(*[("system", "a")] * 60_000)),
        json.dumps(request(*[("system", f"{number}: now 12:30:00") for number in range(20_000)])),
    ],
    ids=["no id", "no id behind one", "messages", "parts"],
)
def test_time_grows_with_the_length_and_no_faster(tmp_path: Path, text: str) -> None:
    """With the square of the length each of these took minutes."""
    path = tmp_path / "long"
    path.write_text(text)
    begun_s = time.process_time()
    assert main(["lint", str(path)]) in (0, 1)
    assert time.process_time() - begun_s < 20


def test_positions_in_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0}, unk_token="w"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    text = "one two three " * 10 + "Request ID: 8f3a99c1d2e4b5a6 " + "word " * 70
    (tmp_path / "prompt.txt").write_text(text)
    model = ["--model", str(tmp_path / "model"), "--block-size", "8"]
    out, _ = told(capsys, *model, "--json", str(tmp_path / "prompt.txt"), status=1)
    [found] = json.loads(out)["findings"]
    assert (found["unit"], found["position"], found["block"], found["total"]) == ("tokens", 32, 4, 103)
    out, _ = told(capsys, *model, str(tmp_path / "prompt.txt"), status=1)
    assert "token 32 (block 4): an id" in out
    _, err = told(capsys, "--model", "/nowhere", str(tmp_path / "prompt.txt"), status=2)
    assert "--model /nowhere is no folder" in err
