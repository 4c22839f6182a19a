"""An engine in its own thread, for an event loop.

    event loop                                 engine thread
    submit, Stream.close ──► commands ──────►  take commands; step while there is work
    Stream.__anext__     ◄── call_soon ◄─────  all outputs of a step at once

Only the thread touches the engine, only the loop touches the streams. The loop also checks now and then whether the
thread still advances: a step may hang, or transfers that never end may hold the pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.engine.llm import TextEngine, TextOutput
from tiercache.engine.sampling import SamplingParams
from tiercache.engine.settings import MAX_WAITING, STALL_TIMEOUT_S
from tiercache.errors import DeadlineExceeded, TierCacheError
from tiercache.ground import forks

logger = logging.getLogger(__name__)
# Limit of unread outputs of one stream: more than a long answer has, too few to fill the memory.
MAX_UNREAD = 1 << 16
# How long an idle engine waits for a command before it checks its state, and how often the loop checks the engine.
_IDLE_S = 1.0
_WATCH_S = 1.0
_CLOSE_TIMEOUT_S = 60.0


class EngineDied(TierCacheError):
    """The engine's thread has ended with an error; it serves no more requests."""


class Stalled(TierCacheError):
    """Requests are in progress and nothing has advanced for too long."""


class Stopping(TierCacheError):
    """The process is about to end."""


class QueueFull(TierCacheError):
    """The limit on waiting requests is reached."""


class StreamUnread(TierCacheError):
    """A stream was ended because too many of its outputs were not read."""


class StreamOutput(NamedTuple):
    """An output of one of the stream's prompts, counted from 0."""

    prompt: int
    output: TextOutput


class Stream:
    """The outputs of some prompts as they come, until each of the `n` sequences of each has ended."""

    def __init__(self, engine: AsyncEngine, prompts: int, n: int) -> None:
        self.submitted_s = time.perf_counter()
        self.prompts = prompts
        self._engine = engine
        self._unfinished = prompts * n
        self._outputs: asyncio.Queue[StreamOutput | None] = asyncio.Queue()
        self._failure: TierCacheError | None = None

    def put(self, output: StreamOutput) -> None:
        """For the engine: the next output."""
        if not self._unfinished:
            return
        if self._outputs.qsize() < MAX_UNREAD:
            self._outputs.put_nowait(output)
            return
        self._outputs = asyncio.Queue()
        self.close()
        self._failure = StreamUnread(f"{MAX_UNREAD} tokens were not read: read faster, or ask for fewer at a time")

    def fail(self, error: TierCacheError) -> bool:
        """For the engine: end the stream with an error after the outputs already queued. False: the stream has already
        ended."""
        if not self._unfinished or self._failure is not None:
            return False
        self._failure = error
        self._outputs.put_nowait(None)
        return True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamOutput:
        """Waits for the next output. Raises EngineDied, Stalled, Stopping and StreamUnread."""
        item = await self._outputs.get() if self._unfinished else None
        if item is None:
            self._unfinished = 0
            failure, self._failure = self._failure, None
            raise failure or StopAsyncIteration
        if item.output.result is not None:
            self._unfinished -= 1
        return item

    def close(self) -> int:
        """Discard the rest: ends unfinished requests, and wakes callers that wait here. Idempotent.

        Returns how many sequences had not ended.
        """
        unfinished, self._unfinished = self._unfinished, 0
        if unfinished:
            self._outputs.put_nowait(None)
            self._engine.withdraw(self)
        return unfinished


@dataclass(frozen=True, slots=True)
class _Submit:
    stream: Stream
    prompts: list[list[int]]
    params: SamplingParams
    priority: int


@dataclass(frozen=True, slots=True)
class _Withdraw:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class AsyncEngine:
    """Serves the requests of an event loop; create and use it on the loop.

    Args:
        text_engine: belongs to this object from now on.
        max_waiting: most prompts without a token yet; one more is refused.
        stall_timeout_s: if nothing advances for this time, waiting callers get Stalled, and so do new callers until
            something advances.
        on_death: called on the loop when the engine has failed.

    Attributes:
        stats: `Engine.stats()` after the last step.
        death: why the engine has failed, or None.
    """

    def __init__(
        self,
        text_engine: TextEngine,
        *,
        max_waiting: int = MAX_WAITING,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats = text_engine.engine.stats()
        self.death: EngineDied | None = None
        self._text_engine = text_engine
        self._max_waiting = max_waiting
        self._stall_timeout_s = stall_timeout_s
        self._on_death = on_death
        self._waiting: set[tuple[Stream, int]] = set()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._refusal: TierCacheError | None = None
        self._commands: queue.SimpleQueue[_Submit | _Withdraw | _Stop] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)
        # The fields below belong to the thread; the loop reads when the thread last advanced, infinite while there are
        # no requests.
        self._advanced_s = math.inf
        self._computed = 0
        self._places: dict[int, tuple[Stream, int]] = {}
        self._request_ids: dict[Stream, set[int]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        forks.watch(self)

    def forget_in_child(self) -> None:
        """In the child of a fork, where the engine's thread does not exist: callers get an error."""
        self._refusal = EngineDied("this process was forked from the one that has the engine: make one here")

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._text_engine.engine.max_model_len

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raises ConfigError for a request that cannot be served."""
        self._text_engine.engine.check_request(prompt, params)

    def submit(self, prompts: list[list[int]], params: SamplingParams, priority: int = 0) -> Stream:
        """Queue a request for each of the prompts (token ids), all or none.

        Close the stream in the end. Raises ConfigError, QueueFull, EngineDied, Stalled and Stopping.
        """
        for prompt in prompts:
            self.check(prompt, params)
        if (refusal := self._refusal or self.stall) is not None:
            raise refusal
        if len(self._waiting) + len(prompts) > self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already, and {self._max_waiting} may: try again later")
        stream = Stream(self, len(prompts), params.n)
        self._streams.add(stream)
        self._waiting.update((stream, prompt) for prompt in range(len(prompts)))
        self._commands.put(_Submit(stream, prompts, params, priority))
        return stream

    def withdraw(self, stream: Stream) -> None:
        """For `Stream.close`."""
        self._waiting.difference_update((stream, prompt) for prompt in range(stream.prompts))
        self._commands.put(_Withdraw(stream))

    @property
    def stall(self) -> Stalled | None:
        """The error for callers while nothing advances, else None."""
        stalled_s = time.monotonic() - self._advanced_s
        if stalled_s < self._stall_timeout_s or self._refusal is not None:
            return None
        return Stalled(f"the engine has not advanced for {stalled_s:.0f} s: send the request again later")

    def end(self, reason: TierCacheError) -> None:
        """Give waiting and new callers `reason`; the engine continues to compute until `close`."""
        self._refusal = reason
        for stream in list(self._streams):
            stream.fail(reason)

    def _watch(self) -> None:
        """Checks now and then, so that no caller waits forever. The thread aborts requests in progress when it can."""
        if (stall := self.stall) is not None:
            failed = [stream for stream in self._streams if stream.fail(stall)]
            if failed:
                logger.error("the engine has not advanced for too long: %d requests fail", len(failed))
            for stream in failed:
                self.withdraw(stream)
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)

    async def close(self) -> None:
        """Abort running requests, wait for transfers to the cache, and end the thread. Idempotent.

        Raises DeadlineExceeded when a step takes longer than a minute.
        """
        self._watcher.cancel()
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine did not stop within {_CLOSE_TIMEOUT_S:.0f} s")

    # --- on the loop, called by the thread

    def _deliver(self, outputs: list[tuple[Stream, StreamOutput]]) -> None:
        for stream, output in outputs:
            self._waiting.discard((stream, output.prompt))
            stream.put(output)

    def _bury(self, death: EngineDied) -> None:
        self.death = death
        self.end(death)
        self._waiting.clear()
        self._on_death()

    # --- the thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                outputs = self._step()
                self.stats = self._text_engine.engine.stats()  # first: a client with an answer finds it counted
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, [self._place(output) for output in outputs])
                    self._forget_ended(outputs)
            self._text_engine.engine.close()
        except Exception as error:
            # Waiting clients must learn of any error.
            logger.exception("the engine has failed")
            death = EngineDied(f"the engine has failed: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._bury, death)

    def _step(self) -> list[TextOutput]:
        engine = self._text_engine.engine
        if self._advanced_s == math.inf and engine.unfinished:
            self._advanced_s = time.monotonic()
        outputs = self._text_engine.step() if engine.busy else []
        # New requests do not count as progress.
        computed = self._computed if outputs else engine.progress[-1]
        if not engine.unfinished:
            self._advanced_s = math.inf
        elif outputs or computed != self._computed:
            self._computed, self._advanced_s = computed, time.monotonic()
        return outputs

    def _take_commands(self) -> bool:
        """Run all queued commands, or wait for the next when there is nothing else to do. False: stop."""
        may_wait = not self._text_engine.engine.busy
        while True:
            try:
                command = self._commands.get(block=may_wait, timeout=_IDLE_S)
            except queue.Empty:
                return True
            may_wait = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Withdraw):
                self._abort(command.stream)
            else:
                self._add(command)

    def _add(self, command: _Submit) -> None:
        ids = self._request_ids[command.stream] = set()
        for place, prompt in enumerate(command.prompts):
            request_id = self._text_engine.add_request(prompt, command.params, command.priority)
            self._places[request_id] = (command.stream, place)
            ids.add(request_id)

    def _abort(self, stream: Stream) -> None:
        for request_id in self._request_ids.pop(stream, ()):  # none if it ended before the command came
            del self._places[request_id]
            self._text_engine.abort(request_id)

    def _place(self, output: TextOutput) -> tuple[Stream, StreamOutput]:
        stream, prompt = self._places[output.request_id]
        return stream, StreamOutput(prompt, output)

    def _forget_ended(self, outputs: list[TextOutput]) -> None:
        ended = {output.request_id for output in outputs if output.result is not None}
        for request_id in ended:
            if not self._text_engine.is_unfinished(request_id):
                stream, _ = self._places.pop(request_id)
                self._request_ids[stream].remove(request_id)
                if not self._request_ids[stream]:
                    del self._request_ids[stream]
