"""Several conversations at once with a real `tiercache serve`, over HTTP, whose KV pool holds a quarter of them.

They take turns: all users speak, all answers are streamed, and each prompt is the whole conversation so far. By its
next turn most blocks of a conversation have been evicted from the pool. With tiers they are loaded, without computed.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tiercache.client.launcher import launch
from tiercache.demo.child import Child, ChildFailed
from tiercache.demo.model import CHAT_TEMPLATE
from tiercache.engine import EngineSettings, describe_model
from tiercache.ground.units import round_up

CONVERSATIONS = 8
TURNS = 4
MESSAGES_PER_PROMPT = 16
"""Length of the demo's long prompt over that of a user's message."""
ANSWER_TOKENS = 32
TEMPLATE_TOKENS = 20
CHUNK_SIZE = 128
POOL_SHARE = 4
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 600.0
POLL_S = 0.02
LOG_LINES = 5
_MIB = 1 << 20


class TurnAnswer(NamedTuple):
    """The answer to one turn of a conversation. Tokens are those of the prompt, except `answer_tokens`."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


class Turn(NamedTuple):
    """One turn of all conversations."""

    seconds: float
    answers: list[TurnAnswer]

    @property
    def ttft_s(self) -> float:
        return statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        return sum(answer.cached_tokens for answer in self.answers)


class Chats(NamedTuple):
    """All turns with one server, and from its metrics at the end the tokens found in the daemon's tiers."""

    turns: list[Turn]
    preemptions: int
    tier_tokens: int

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def throughput(self) -> float:
        """Tokens answered per second."""
        return sum(answer.answer_tokens for turn in self.turns for answer in turn.answers) / self.seconds

    @property
    def texts(self) -> list[list[str]]:
        return [[answer.text for answer in turn.answers] for turn in self.turns]


class ServerProcess(Child):
    """A `tiercache serve` that is ready, run by `module`. Raises ChildFailed with the end of its log."""

    def __init__(self, module: str, log: Path, *flags: str) -> None:
        super().__init__(module, *flags, "--port", "0", "--grace", "0", log=log)
        self._log = log
        try:
            address = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self._host, self._port = address

    def _wait_until_ready(self) -> tuple[str, int]:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(r"is served at (\S+)/v1", text := self._log.read_text(errors="replace"))):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise ChildFailed("the server did not start:\n  " + "\n  ".join(text.splitlines()[-LOG_LINES:]))
            time.sleep(POLL_S)
        url = urlsplit(found[1])
        assert url.hostname is not None
        assert url.port is not None
        return url.hostname, url.port

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ChildFailed(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChildFailed(f"the server does not answer: {error}") from error
        finally:
            connection.close()

    def chat(self, messages: list[dict[str, str]]) -> TurnAnswer:
        """One streamed answer, greedy and of `ANSWER_TOKENS`. Blocks."""
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, ttft_s, text, usage = time.perf_counter(), 0.0, "", None
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                name, _, content = line.strip().partition(b": ")
                if name != b"data" or content == b"[DONE]":
                    continue
                event = json.loads(content)
                if "error" in event:
                    raise ChildFailed(f"the server failed a request: {event['error']['message']}")
                usage = event.get("usage") or usage
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if piece and not text:
                    ttft_s = time.perf_counter() - began_s
                text += piece
        if usage is None:
            raise ChildFailed("the server ended a stream before its end")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return TurnAnswer(text, ttft_s, usage["prompt_tokens"], cached, usage["completion_tokens"])

    def metric(self, name: str) -> int:
        with self._request("GET", "/metrics") as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found = [sample.value for family in families for sample in family.samples if sample.name == f"tiercache:{name}"]
        return int(sum(found))


class ChatDemo:
    """The conversations, with tiers and without.

    Args:
        model: the model's folder.
        tokenizer: the model's, from transformers.
        tokens: tokens of a text, from which the users' messages are taken.
        folder: an empty folder, for files of the daemon and the servers.
        console: where progress is printed.
        server: the module that runs `tiercache serve` until the end of its stdin.
    """

    def __init__(
        self, model: Path, tokenizer: Any, tokens: list[int], folder: Path, console: Console, server: str
    ) -> None:
        self._model = model
        self._server = server
        self._folder = folder
        self._console = console
        said = max(1, len(tokens) // MESSAGES_PER_PROMPT)
        starts = [number * said % (len(tokens) - said) for number in range(CONVERSATIONS * TURNS)]
        # Each conversation has its own beginning, or they would share their first blocks.
        messages = [f"({number}) {tokenizer.decode(tokens[at : at + said])}" for number, at in enumerate(starts)]
        self._messages = [messages[turn::TURNS] for turn in range(TURNS)]
        self.flags = [str(model), "--chunk-size", str(CHUNK_SIZE)]
        if tokenizer.chat_template is None:
            template = folder / "template.jinja"
            template.write_text(CHAT_TEMPLATE)
            self.flags += ["--chat-template", str(template)]
        namespaces, _ = describe_model(model, EngineSettings(chunk_size=CHUNK_SIZE))
        longest = max(len(tokenizer(message)["input_ids"]) for message in messages)
        blocks = -(-TURNS * (longest + ANSWER_TOKENS + TEMPLATE_TOKENS) // namespaces[0].block_size)
        self.pool_blocks = CONVERSATIONS * blocks * len(namespaces) // POOL_SHARE
        self.kv_bytes = CONVERSATIONS * blocks * sum(namespace.block_bytes for namespace in namespaces)

    def play(self) -> tuple[Chats, Chats]:
        """The same conversations twice: without tiers, and with them. Raises ChildFailed."""
        without = self._converse("without tiers", "--no-cache")
        with ExitStack() as stack:
            arena = round_up(self.kv_bytes + self.kv_bytes // 4 + 64 * _MIB, 2 * _MIB)
            daemon = stack.enter_context(launch(arena, run_dir=self._folder / "chat"))
            return without, self._converse("with tiers", "--daemon", daemon.address)

    def _converse(self, name: str, *flags: str) -> Chats:
        with self._console.status(f"starting a server {name}"):
            log = self._folder / f"{name.replace(' ', '-')}.log"
            server = ServerProcess(self._server, log, *self.flags, "--pool-blocks", str(self.pool_blocks), *flags)
        histories: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
        with server:
            server.chat([{"role": "user", "content": "?"}])  # a warm-up
            turns = []
            for number in range(TURNS):
                with self._console.status(f"{CONVERSATIONS} conversations {name}, turn {number + 1} of {TURNS}"):
                    turns.append(self._turn(server, histories, self._messages[number]))
            tier_tokens = server.metric("external_prefix_cache_hits_total")
            return Chats(turns, server.metric("num_preemptions_total"), tier_tokens)

    def _turn(self, server: ServerProcess, histories: list[list[dict[str, str]]], messages: list[str]) -> Turn:
        for history, message in zip(histories, messages, strict=True):
            history.append({"role": "user", "content": message})
        executor = ThreadPoolExecutor(CONVERSATIONS, thread_name_prefix="user")
        began_s = time.perf_counter()
        try:
            answers = list(executor.map(server.chat, histories))
        finally:
            # Not waited for: after Control-C they end with the server.
            executor.shutdown(wait=False, cancel_futures=True)
        for history, answer in zip(histories, answers, strict=True):
            history.append({"role": "assistant", "content": answer.text})
        return Turn(time.perf_counter() - began_s, answers)
