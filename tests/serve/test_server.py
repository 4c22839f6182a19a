"""The server as clients see it: a real process, asked with OpenAI's own client; its beginnings, troubles and ends."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError, OpenAI, RateLimitError
from server_process import POST, TIMEOUT_S, ServerProcess
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.engine import LLM, SamplingParams
from tiercache.serve.failures import ApiError
from tiercache.serve.requests import check_size

pytestmark = pytest.mark.engine
FLAGS = ("--pool-blocks", "640", "--block-size", "8", "--chunk-size", "32", "--arena", "64MiB")
MODEL = "tiny-chat"
PROMPT = "Good morning, said the cat to the dog."
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model_dir, tmp_path_factory.mktemp("server") / "log", *FLAGS) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> OpenAI:
    return server.client


def complete(client: OpenAI, prompt: Any = PROMPT, **more: Any) -> Any:
    return client.completions.create(**{**GREEDY, "prompt": prompt, "max_tokens": 20, **more})


def chat(client: OpenAI, text: str = "Why?", **more: Any) -> Any:
    messages = [{"role": "system", "content": "Purr."}, {"role": "user", "content": text}]
    return client.chat.completions.create(**{**GREEDY, "messages": messages, "max_tokens": 20, **more})


def post(server: ServerProcess, body: bytes, path: str = "/v1/completions", method: str = "POST") -> tuple[int, Any]:
    """A request as no client library would send it; the status and the `error` of the answer."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=TIMEOUT_S)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    tree = json.loads(answer.read())
    connection.close()
    return answer.status, tree["error"]


def test_a_completion_has_text_usage_and_a_reason(client: OpenAI) -> None:
    whole = complete(client, "Usage of something new. " * 3)
    assert (whole.object, whole.model, len(whole.choices)) == ("text_completion", MODEL, 1)
    [choice] = whole.choices
    assert (choice.index, choice.finish_reason, len(choice.text)) == (0, "length", 20)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (72, 20, 92)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    again = complete(client, "Usage of something new. " * 3)
    assert again.choices == whole.choices
    assert again.usage.prompt_tokens_details.cached_tokens == 64


def test_a_stream_has_the_same_text_and_the_usage_if_asked_for(client: OpenAI) -> None:
    whole = complete(client)
    parts = list(complete(client, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts] == [None] * 19 + ["length"]
    assert all(part.usage is None for part in parts)
    *_, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], len(PROMPT), 20)


def test_chats_go_through_the_template(client: OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    plain = complete(client, "<|system|>Purr.<end><|user|>Why?<end><|assistant|>")
    assert (choice.message.content, answer.usage.prompt_tokens) == (plain.choices[0].text, plain.usage.prompt_tokens)
    first, *parts = chat(client, stream=True)
    assert (first.object, first.choices[0].delta.role) == ("chat.completion.chunk", "assistant")
    assert "".join(part.choices[0].delta.content for part in parts) == choice.message.content
    parts_of_text = [{"type": "text", "text": "W"}, {"type": "text", "text": "hy?"}]
    several = chat(client, parts_of_text)  # type: ignore[arg-type]
    assert several.usage.prompt_tokens == answer.usage.prompt_tokens + 1  # a new line between the parts
    moody = chat(client, extra_body={"chat_template_kwargs": {"mood": "Grr"}})
    assert moody.usage.prompt_tokens == answer.usage.prompt_tokens + 3


def test_without_a_limit_a_chat_may_fill_the_context(client: OpenAI) -> None:
    answer = chat(client, "x" * 970, max_tokens=None)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 1024
    assert chat(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


def test_several_prompts_and_choices_are_told_apart(client: OpenAI) -> None:
    prompts = [PROMPT, "Once upon a time"]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = complete(client, prompts, n=2)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert together.usage.completion_tokens == 80
    texts = [""] * 4
    for part in complete(client, prompts, n=2, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in together.choices]
    tokens = list(range(40, 80))
    assert complete(client, tokens).choices[0].text == complete(client, [tokens]).choices[0].text


def test_stop_strings_are_left_out_of_whole_and_streamed_texts(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[8:11]
    cut = text[: text.index(stop)]
    whole = complete(client, stop=["no such text", stop]).choices[0]
    assert (whole.text, whole.finish_reason) == (cut, "stop")
    parts = list(complete(client, stop=stop, stream=True))
    assert ("".join(part.choices[0].text for part in parts), parts[-1].choices[0].finish_reason) == (cut, "stop")


def test_logprobs_in_both_forms(client: OpenAI) -> None:
    choice = complete(client, logprobs=2, max_tokens=4).choices[0]
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    for token, logprob, top in zip(
        choice.text, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values()) < 0
    content = chat(client, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    assert [bytes(entry.bytes).decode() for entry in content] == [entry.token for entry in content]
    assert sum(math.exp(other.logprob) for other in content[0].top_logprobs) <= 1
    *parts, _ = chat(client, logprobs=True, max_tokens=4, stream=True)
    assert sum(len(part.choices[0].logprobs.content) for part in parts if part.choices[0].logprobs) >= 3


def test_vllms_own_fields_are_served(client: OpenAI) -> None:
    plain = complete(client).choices[0].text
    biased = complete(client, logit_bias={"40": 100.0}, max_tokens=3)
    assert len(set(biased.choices[0].text)) == 1
    extra = {"top_k": 1, "min_p": 0.5, "repetition_penalty": 1.0, "min_tokens": 2, "priority": 3, "ignore_eos": True}
    assert complete(client, temperature=1, extra_body=extra).choices[0].text == plain
    assert complete(client, extra_body={"top_k": -1}, user="a-user").choices[0].text == plain


def test_models_health_and_metrics(server: ServerProcess, client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, 1024)
    assert client.models.retrieve(MODEL).id == MODEL
    before = server.metrics()
    complete(client, "A prompt for the metrics, and for nothing else.")
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert grown["tiercache:prompt_tokens_total"] == 47
    assert grown["tiercache:generation_tokens_total"] == 20
    assert grown["tiercache:time_to_first_token_seconds_count"] == 1
    assert grown["tiercache:inter_token_latency_seconds_count"] == 19
    assert grown["tiercache:e2e_request_latency_seconds_count"] == 1
    assert grown["tiercache:request_decode_time_seconds_sum"] <= grown["tiercache:e2e_request_latency_seconds_sum"]
    assert grown["tiercache:request_params_max_tokens_sum"] == 20
    assert grown["tiercache:request_prompt_tokens_sum"] == 47
    assert grown["tiercache:request_success_total{length}"] == 1
    assert grown["tiercache:prefix_cache_queries_total"] == 47


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "must be 0 (greedy) or more"),
        ("temperature", "hot", "Expected `float | null`, got `str`"),
        ("max_tokens", 10**12, "exceed the 1024 tokens"),
        ("n", 65, "max_num_seqs 64"),
        ("n", 10**9, "128 choices"),
        ("stop_token_ids", [5] * 100_000, "stop_token_ids is (5, 5, 5, 5, "),
        ("logit_bias", {"99999": 1}, "not in 0..259"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("prompt", [1, "x"], "mixes"),
        ("prompt", [], "empty list"),
        ("prompt", ["x"] * 129, "129 prompts: a request may have 128 choices"),
        ("prompt", [99999], "wrong tokenizer"),
        ("prompt", "", "the prompt is empty"),
        ("prompt", "x" * 9_000, "a text of 9000 characters has more than the 1024 tokens"),
        ("prompt", "x" * 900_000, "a text of 900000 characters has more than the 1024 tokens"),
        ("prompt", None, "missing required field `prompt`"),
        ("echo", True, "not served"),
        ("best_of", 3, "not served"),
        ("response_format", {"type": "json_object"}, "not served"),
        ("guided_json", {}, "guided_json"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server: ServerProcess, field: str, value: Any, words: str) -> None:
    body = {"prompt": "x", field: value}
    status, error = post(server, json.dumps(body).encode())
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert words in error["message"]
    assert field in error["message"] or field == "prompt"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], "messages[0] has no role"),
        ([{"role": "wizard", "content": "x"}], "no such role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "only text is served"),
        ([{"role": "user", "content": 5}], "messages[0].content must be"),
        ("hello", "messages: Expected `array`"),
        ([{"role": "user", "content": "x" * 2000}], "exceed the 1024 tokens"),
    ],
)
def test_conversations_that_cannot_be_served(server: ServerProcess, messages: Any, words: str) -> None:
    status, error = post(server, json.dumps({"messages": messages}).encode(), "/v1/chat/completions")
    assert status == 400, error
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}'],
)
def test_bodies_that_are_no_request(server: ServerProcess, body: bytes) -> None:
    status, error = post(server, body)
    assert (status, error["type"]) == (400, "invalid_request_error"), error


def test_other_paths_methods_models_and_sizes(server: ServerProcess, client: OpenAI) -> None:
    assert post(server, b"", "/v2/x")[0] == 404
    assert post(server, b"", method="GET")[0] == 405
    assert post(server, b" " * (17 << 20))[0] == 413
    with pytest.raises(NotFoundError, match=f"this server has {MODEL}") as caught:
        complete(client, model="gpt-7")
    assert caught.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="tools is not served") as refused:
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    with pytest.raises(BadRequestError, match="shorten the prompt, or lower max_tokens to 14"):
        complete(client, "x" * 1010)


def test_an_answer_fits_into_memory() -> None:
    check_size(128, SamplingParams(max_tokens=100_000))
    check_size(1, SamplingParams(max_tokens=100_000, logprobs=20))
    with pytest.raises(ApiError, match="10752000 log-probabilities, and an answer may have"):
        check_size(128, SamplingParams(max_tokens=4000, logprobs=20))


@pytest.mark.stress
def test_a_client_that_hangs_up_frees_its_blocks(server: ServerProcess, client: OpenAI) -> None:
    before = server.metric("generation_tokens_total")
    stream = complete(client, max_tokens=980, stream=True, n=4)
    next(iter(stream))
    wait_until(lambda: server.metric("num_requests_running") == 4, "the request runs")
    assert server.metric("kv_cache_usage_perc") > 0
    stream.close()
    server.wait_until_idle()
    between = server.metric("generation_tokens_total")
    assert between - before < 4 * 980
    body = json.dumps({"prompt": PROMPT, "max_tokens": 980, "temperature": 0}).encode()
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.metric("num_requests_running") == 1, "the request runs")
    server.wait_until_idle()
    assert server.metric("generation_tokens_total") - between < 980


# --- beginnings, troubles and ends -------------------------------------------------------------------


LIFE = ("--pool-blocks", "640", "--block-size", "8", "--chunk-size", "32")
TIMES = "It was the best of times, it was the worst of times. " * 3
PATIENT = """
import functools, tiercache
tiercache.connect = functools.partial(tiercache.connect, request_timeout_s=60.0)
"""
"""An engine does without a block when the daemon is silent for half a second, as on a busy machine it may be."""
ASKED: dict[str, Any] = {"model": "tiny-chat", "temperature": 0, "prompt": TIMES}


def refuses_connections(server: ServerProcess) -> bool:
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.stress
def test_sigterm_finishes_what_runs_and_good_blocks_survive(model_dir: Path, tmp_path: Path) -> None:
    nvme = ("--arena", "64MiB", "--nvme", str(tmp_path / "nvme"), "--nvme-size", "2GiB")
    with ServerProcess(model_dir, tmp_path / "first.log", *LIFE, *nvme, patch=PATIENT) as server:
        stream = iter(server.client.completions.create(**ASKED, max_tokens=300, n=4, stream=True))
        next(stream)
        server.terminate()
        wait_until(lambda: refuses_connections(server), "no new connections")
        reasons = [part.choices[0].finish_reason for part in stream]
        assert reasons.count("length") == 4
        assert server.wait() == 0, server.log.read_text()
    sizes: dict[str, Any] = {"pool_blocks": 64, "block_size": 8, "chunk_size": 32, "load_timeout_s": 50}
    with (
        tiercache.launch("64MiB", nvme=str(tmp_path / "nvme"), nvme_size="2GiB") as daemon,
        LLM(model_dir, daemon=daemon.address, always_load=True, **sizes) as llm,
    ):
        [answer] = llm.generate(TIMES, SamplingParams(max_tokens=20))
        assert answer.cached_tokens == len(TIMES) // 8 * 8, "another process finds the blocks on the disk"


@pytest.mark.stress
def test_requests_outlive_the_daemon(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    limits = ("--max-num-seqs", "2", "--max-queued-requests", "5", "--api-key", "secret", "--grace", "1")
    with (
        tiercache.launch("64MiB", run_dir=run_dir) as daemon,
        ServerProcess(model_dir, tmp_path / "log", *LIFE, *limits, "--daemon", str(run_dir)) as server,
    ):
        expected = server.client.completions.create(**ASKED, max_tokens=300).choices[0].text
        texts: list[str] = []

        def ask() -> None:
            texts.append(server.client.completions.create(**ASKED, max_tokens=300).choices[0].text)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 2, "requests run")
        os.kill(daemon.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(100)
        assert texts == [expected] * 4
        server.wait_until_idle()
        _check_queue(server)
        _check_deadline(server)


FAILS_IN_THE_END = """
from tiercache.engine.model import HostedModel
forward, calls = HostedModel.forward, []
def failing(*arguments):
    calls.append(1)
    if len(calls) == 100:
        raise MemoryError("no memory for that")
    return forward(*arguments)
HostedModel.forward = failing
"""


@pytest.mark.stress
def test_a_server_whose_engine_fails_says_so_and_ends(model_dir: Path, tmp_path: Path) -> None:
    with ServerProcess(model_dir, tmp_path / "log", *LIFE, "--no-cache", patch=FAILS_IN_THE_END) as server:
        with pytest.raises(APIError, match="the engine has failed: MemoryError: no memory for that"):
            list(server.client.completions.create(**ASKED, max_tokens=500, stream=True))
        assert server.wait() == 1
        assert "no memory for that" in server.log.read_text()


def _check_queue(server: ServerProcess) -> None:
    """Two run and five may wait."""
    with server.client.completions.create(**{**ASKED, "prompt": ["a", "b"]}, max_tokens=900, stream=True) as running:
        next(iter(running))
        wait_until(lambda: server.metric("num_requests_running") == 2, "two run")
        with pytest.raises(RateLimitError, match="5 may: try again later") as caught:
            server.client.completions.create(**{**ASKED, "prompt": ["c"] * 6})
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
    server.wait_until_idle()


def _check_deadline(server: ServerProcess) -> None:
    """SIGTERM does not wait for a step of several seconds."""
    prompts = {**ASKED, "prompt": ["a", "b", "c", "d", "e"]}
    with server.client.completions.create(**prompts, max_tokens=1000, stream=True) as stream:
        next(iter(stream))
        server.terminate()
        assert server.wait() == 0, server.log.read_text()
        with pytest.raises(APIError, match="the server is stopping"):
            list(stream)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "PORT"], ["port", "cannot be listened on", "choose another"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid", "choose another"]),
        (["--block-size", "x"], ["--block-size", "x", "serve --help"]),
        (["--blocksize", "8"], ["--blocksize"]),
        (["--max-model-len", "4096", "--no-cache"], ["max_model_len is 4096"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    model_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status = main(["serve", str(model_dir), "--port", "0", *(port if flag == "PORT" else flag for flag in flags)])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert (err.count("\n"), err[:11]) == (1, "tiercache: ")
    assert [word for word in words if word not in err] == []


def test_a_model_that_is_not_there_is_said_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiercache.serve.server", None)
    assert main(["serve", str(tmp_path / "model")]) == 2
    assert "model is not a folder: give that of a Hugging Face model" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "no tokenizer" in capsys.readouterr().err


# --- a server in trouble: a step that hangs, half a request, connections that stand still ------------


# A pool for one sequence of the longest kind and a little more, so that other requests' blocks do not stay.
SMALL = ("--pool-blocks", "144", "--block-size", "8", "--chunk-size", "32")

# Steps hang while the file is there. Connections are swept often, and the kernel keeps little of what is not read.
HANGS = """
import os, socket, time
from tiercache.engine.model import HostedModel
from tiercache.ground import listening
from tiercache.serve import app, server
forward = HostedModel.forward
def hanging(*arguments):
    while os.path.exists({file!r}):
        time.sleep(0.01)
    return forward(*arguments)
HostedModel.forward = hanging
server.SWEEP_S = 1
app.BODY_TIMEOUT_S = 5.0
bind = listening.bind
def bind_small(*arguments):
    listener = bind(*arguments)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return listener
listening.bind = bind_small
"""


@pytest.mark.stress
def test_a_step_that_hangs_is_said_and_survived(model_dir: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limits = ("--stall-timeout", "6", "--max-num-seqs", "8", "--no-cache")
    patch = HANGS.format(file=str(hangs))
    with ServerProcess(model_dir, tmp_path / "log", *SMALL, *limits, patch=patch) as server:
        expected = server.client.completions.create(**ASKED, max_tokens=20).choices[0].text
        _check_half_a_head(server)
        _check_unread_body(server)
        _check_unread_answer(server)
        hangs.touch()
        with pytest.raises(InternalServerError, match="the engine has not advanced for") as caught:
            server.client.completions.create(**ASKED)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_stalled")
        assert caught.value.response.headers["retry-after"] == "10"
        assert server.health() == (503, "engine_stalled")
        with pytest.raises(InternalServerError, match="send the request again later"):
            server.client.completions.create(**ASKED)
        hangs.unlink()
        wait_until(lambda: server.health() == (200, None), "the engine is healthy again")
        assert server.client.completions.create(**ASKED, max_tokens=20).choices[0].text == expected
        server.wait_until_idle()
        with server.connect() as connection:
            connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")  # half a body
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert "Traceback" not in server.log.read_text()


def _check_half_a_head(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /v1/comple")
        assert connection.recv(1) == b""


def _check_unread_body(server: ServerProcess) -> None:
    """A body without an end is refused, and the server does not wait for the rest of it."""
    with server.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"200000\r\n" + bytes(1 << 21) + b"\r\n")
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def _check_unread_answer(server: ServerProcess) -> None:
    """A client that reads nothing of its stream does not keep it."""
    # So many that they are not all computed before the connection has stood still for long enough.
    body = json.dumps({**ASKED, "prompt": ["x"] * 32, "max_tokens": 1000, "logprobs": 20, "stream": True}).encode()
    url = urlsplit(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.metric("request_success_total{abort}"), "the end")
