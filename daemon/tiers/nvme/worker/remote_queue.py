"""The queue of a directory whose I/O a worker process does: what may be sent waits here, by priority, for credit.

    submit ─► [LOAD] [PREFETCH] [WRITE] ─► packets ─► the process ─► packets ─► done
                    bounded                  credit: so many blocks and bytes under way

When the process has ended, what it had taken comes to nothing: reads are CANCELLED, which makes them misses; writes are
sent to the next process, into the same slots. Both keep frame and slot until the process is certainly gone.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from tiercache.daemon.tiers.nvme.disk.backlog import DiskPriority
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, BlockOp, DiskOutcome, TaskOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.queue import QUEUE_LIMITS
from tiercache.daemon.tiers.nvme.disk.tally import Tally

from . import records
from .packets import give_up_line, send_now
from .records import Tag
from .regions import ArenaFiles

MAX_SENT, MAX_SENT_BYTES = 1024, 64 << 20
"""Blocks with the process, and their bytes; one operation at least, and as much more as the last one has."""
MAX_SENT_WRITES, MAX_SENT_WRITE_BYTES = 768, 48 << 20
"""Of these, writes: a load that arrives between writes does not wait for them."""
REFILL_SHARE = 8
"""Blocks that wait are sent when one part of the credit in this number is free: the rest keeps the disk busy."""
DELIVER_NS = 1_000_000
"""Time for taking packets in one turn of the loop; the one in progress is finished."""
CANCELLED_AT_ONCE = 256
"""Operations that are passed to their `done` in one turn of the loop where many are cancelled together."""
MAX_TRIES = 5
"""Processes that may end with a write: one that makes them end would do so forever."""
NO_FRAME = -1


class RemoteQueue(Tally):
    """See `DiskQueue`. Event loop only; nothing blocks but `stop`.

    `from_thread(callback)`: `loop.call_soon_threadsafe`; `wait_for_room(line, callback)`: call it whenever the line can
    be written to, until told None.
    """

    def __init__(
        self,
        arena: ArenaFiles,
        from_thread: Callable[[Callable[[], None]], object],
        wait_for_room: Callable[[socket.socket, Callable[[], None] | None], None],
        limits: dict[DiskPriority, int] | None = None,
    ) -> None:
        super().__init__()
        self.io, self.io_reason = "", "no process has it open"
        """What carries blocks in the process; see `DiskQueue`."""
        self.heard_s = time.monotonic()
        """When the process last said anything here."""
        self._disk_since_s = 0.0  # nothing that the disk has now began earlier, as the process has last said
        self._arena = arena
        self._from_thread = from_thread
        self._wait_for_room = wait_for_room
        self._limits = {**QUEUE_LIMITS, **(limits or {})}
        self._line: socket.socket | None = None
        self._down_s = time.monotonic()  # since when there is no process
        self._waiting: tuple[deque[BlockOp], ...] = (deque(), deque(), deque())
        self._waiting_blocks = [0] * len(self._waiting)
        self._sent: dict[int, BlockOp] = {}  # by number, the oldest first
        self._sent_at: deque[tuple[int, float]] = deque()  # last number of each packet, and when it was sent
        self._sent_blocks = self._sent_bytes = self._sent_writes = self._sent_write_bytes = 0
        self._next = 0
        self._names: dict[str, int] = {}
        self._packets: deque[tuple[bytes, int]] = deque()  # on their way, each with a descriptor or -1
        self._cancelled: deque[AnyOp] = deque()
        self._cancelling = False
        self._lost_with: Counter[AnyOp] = Counter()  # writes of the last process that ended: how many ended with each
        self._stopping = False
        self._tasks: queue.SimpleQueue[TaskOp | None] = queue.SimpleQueue()
        self._open_tasks: dict[TaskOp, None] = {}
        self._task_since_s = 0.0
        self._task_thread = threading.Thread(target=self._do_tasks, name="nvme tasks", daemon=True)
        self._task_thread.start()

    # --- submitting ------------------------------------------------------------------------------

    def submit(self, op: AnyOp, priority: DiskPriority) -> bool:
        """See `DiskQueue`."""
        return self.submit_many([op], priority) == 1

    def submit_many(self, ops: Sequence[AnyOp], priority: DiskPriority) -> int:
        """See `DiskQueue`."""
        room = 0 if self._stopping else self._limits[priority] - self._waiting_blocks[priority]
        accepted, now_ns = 0, time.monotonic_ns()
        for op in ops:
            room -= op.count
            if room < 0:
                break
            accepted += 1
            op.submitted_ns, op.priority = now_ns, priority
            op.held_bytes = op.moved_bytes
            self.in_flight += op.count
            self.in_flight_bytes += op.held_bytes
            if isinstance(op, TaskOp):
                self._open_tasks[op] = None
                self._tasks.put(op)
            else:
                self._waiting[priority].append(op)
                self._waiting_blocks[priority] += op.count
        self.refused += sum([op.count for op in ops[accepted:]])
        self._send()
        return accepted

    def cancel_queued(self, priority: DiskPriority | None = None) -> int:
        """See `DiskQueue`. What the process has not started ends as CANCELLED too, when it says so."""
        cancelled: list[BlockOp] = []
        for number, waiting in enumerate(self._waiting):
            if priority is None or number == priority:
                cancelled += waiting
                waiting.clear()
                self._waiting_blocks[number] = 0
        for op in cancelled:
            self._cancel(op)
        if self._line is not None and self._sent:
            self._packets.append((records.cancel_packet(priority), -1))
            self._send_packets()
        return sum([op.count for op in cancelled])

    def _cancel(self, op: AnyOp) -> None:
        """Pass it to its `done` soon: the caller does not expect that in here."""
        op.end(0, op.count, DiskOutcome.CANCELLED)
        self._cancelled.append(op)
        self._go_on_cancelling()

    def _go_on_cancelling(self) -> None:
        if self._cancelled and not self._cancelling:
            self._cancelling = True
            self._from_thread(self._deliver_soon)

    def _deliver_soon(self) -> None:
        self._cancelling = False
        self._deliver_cancelled()
        self._go_on_cancelling()

    def _deliver_cancelled(self) -> None:
        """Pass some of them to their `done`."""
        self._deliver([self._cancelled.popleft() for _ in range(min(CANCELLED_AT_ONCE, len(self._cancelled)))])

    def queued(self, priority: DiskPriority | None = None) -> int:
        """Blocks that wait for credit, or with a process for its disk."""
        return sum(self._waiting_blocks) if priority is None else self._waiting_blocks[priority]

    def oldest_age_s(self) -> float:
        """How long the longest-running operation has been under way, as far as known, or there has been no process.

        Blocks that wait in the process do not count: a backlog is no fault of the disk.
        """
        since_s = [self._down_s] if self._line is None else []
        if self._sent:
            oldest = next(iter(self._sent))
            while self._sent_at[0][0] < oldest:
                self._sent_at.popleft()
            since_s.append(max(self._sent_at[0][1], self._disk_since_s))
        if self._task_since_s:
            since_s.append(self._task_since_s)
        return time.monotonic() - min(since_s) if since_s else 0.0

    def stats(self) -> dict[str, object]:
        """See `DiskQueue`."""
        return {
            **self._counts(),
            "io": self.io,
            "io_reason": self.io_reason,
            "queued": self.queued(),
            "waiting": {priority.name.lower(): self.queued(priority) for priority in DiskPriority},
            "oldest_age_s": self.oldest_age_s(),
        }

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in words."""
        sent = list(self._sent.values())
        writes, waiting = [op for op in sent if isinstance(op, WriteOp)], [op for each in self._waiting for op in each]
        under_way = [*waiting, *sent, *self._cancelled, *self._open_tasks]
        books = {
            "in flight": (self.in_flight, sum(op.count for op in under_way)),
            "waiting": (self.queued(), sum(op.count for op in waiting)),
            "sent": (self._sent_blocks, sum(op.count for op in sent)),
            "bytes sent": (self._sent_bytes, sum(op.held_bytes for op in sent)),
            "writes sent": (self._sent_writes, sum(op.count for op in writes)),
            "bytes of writes sent": (self._sent_write_bytes, sum(op.held_bytes for op in writes)),
        }
        return [f"{name}: {kept} counted, {found} found" for name, (kept, found) in books.items() if kept != found]

    # --- the process -----------------------------------------------------------------------------

    def connect(self, line: socket.socket) -> None:
        """A process is there: tell it what it needs to know, and send what waits."""
        self._line = line
        self.heard_s = self._disk_since_s = time.monotonic()
        self._names.clear()
        self._packets.clear()
        for region, fd in self._arena.regions:
            self._packets.append((records.region_packet(region.region_id, region.size_bytes), fd))
        self._send()

    def add_region(self, region_id: int, size_bytes: int, fd: int) -> None:
        """The arena has one more region."""
        if self._line is not None:
            self._packets.append((records.region_packet(region_id, size_bytes), fd))
            self._send_packets()

    def disconnect(self) -> None:
        """The process is ending: send it nothing more. What it has keeps its frames and slots until `lost`."""
        self._line, self._down_s = None, time.monotonic()
        self._packets.clear()

    def lost(self) -> None:
        """The process is gone, and its I/O is over. A write that several processes have not survived is CANCELLED."""
        left = list(self._sent.values())
        self._sent.clear()
        self._sent_at.clear()
        self._sent_blocks = self._sent_bytes = self._sent_writes = self._sent_write_bytes = 0
        writes = [op for op in left if isinstance(op, WriteOp) and not self._stopping]
        self._lost_with = Counter({op: self._lost_with[op] + 1 for op in writes})
        writes = [op for op in writes if self._lost_with[op] < MAX_TRIES]
        self._waiting[DiskPriority.WRITE].extendleft(reversed(writes))
        self._waiting_blocks[DiskPriority.WRITE] += sum([op.count for op in writes])
        again = set(map(id, writes))
        for op in left:
            if id(op) not in again:
                self._cancel(op)

    def ping(self) -> None:
        """Have the process say that it is alive."""
        self._packets.append((records.PING, -1))
        self._send_packets()

    # --- sending ---------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send what waits, as far as there is credit and room on the line."""
        self._send_packets()
        while self._line is not None and not self._packets and (ops := self._next_ops()):
            self._pack(ops)
            self._send_packets()

    def _next_ops(self) -> list[BlockOp]:
        """At most a packet of the first queue that has credit."""
        for priority, waiting in enumerate(self._waiting):
            ops: list[BlockOp] = []
            write = priority == DiskPriority.WRITE
            while waiting and len(ops) < records.MAX_RECORDS and self._has_credit(waiting[0], write):
                op = waiting.popleft()
                self._waiting_blocks[priority] -= op.count
                self._sent_blocks += op.count
                self._sent_bytes += op.held_bytes
                if write:
                    self._sent_writes += op.count
                    self._sent_write_bytes += op.held_bytes
                self._sent[self._next + len(ops)] = op
                ops.append(op)
            if ops or waiting:
                return ops  # a large block waits for credit: smaller ones behind it must not take that
        return []

    def _has_credit(self, op: BlockOp, write: bool) -> bool:
        if not self._sent:
            return True
        if (
            write
            and self._sent_writes
            and (self._sent_writes >= MAX_SENT_WRITES or self._sent_write_bytes + op.held_bytes > MAX_SENT_WRITE_BYTES)
        ):
            return False
        return self._sent_blocks < MAX_SENT and self._sent_bytes + op.held_bytes <= MAX_SENT_BYTES

    def _pack(self, ops: Sequence[BlockOp]) -> None:
        packed, frame_at = [], self._arena.frame_at
        for number, op in enumerate(ops, self._next):
            name = self._names.get(op.fingerprint)
            if name is None:
                name = self._names[op.fingerprint] = len(self._names)
                self._packets.append((records.name_packet(name, op.fingerprint), -1))
            frames = [NO_FRAME if address == NOWHERE else frame_at(address) for address in op.addresses]
            packed.append(records.pack_op(number, op, name, frames))
        self._next += len(ops)
        self._sent_at.append((self._next - 1, time.monotonic()))
        self._packets.append((records.packet(Tag.BLOCKS, packed), -1))

    def _send_packets(self) -> None:
        line = self._line
        while self._packets and line is not None:
            data, fd = self._packets[0]
            try:
                send_now(line, data, fd)
            except BlockingIOError:
                self._wait_for_room(line, self._go_on)
                return
            except OSError as error:
                give_up_line(line, error)
                return  # `disconnect` follows
            self._packets.popleft()

    def _go_on(self) -> None:
        if self._line is not None:
            self._wait_for_room(self._line, None)
            self._send_packets()
            self._send()

    # --- receiving -------------------------------------------------------------------------------

    def readable(self, line: socket.socket) -> bool:
        """Take what the process says, for a while; False at the end of the line."""
        until_ns = time.perf_counter_ns() + DELIVER_NS
        while True:
            try:
                data = line.recv(records.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not data:
                return False
            self.heard_s = time.monotonic()
            if data[0] == Tag.ENDS:
                self._take_ends(data)
            else:
                self._disk_since_s = self.heard_s - records.pong_age_s(data)
            if time.perf_counter_ns() >= until_ns:
                break
        if self._packets or self._is_low:
            self._send()
        return True

    @property
    def _is_low(self) -> bool:
        """True if enough credit is free to be worth a packet: of large blocks each comes back alone."""
        if self._waiting[DiskPriority.LOAD] or self._waiting[DiskPriority.PREFETCH]:
            return MAX_SENT_BYTES - self._sent_bytes >= MAX_SENT_BYTES // REFILL_SHARE
        return MAX_SENT_WRITE_BYTES - self._sent_write_bytes >= MAX_SENT_WRITE_BYTES // REFILL_SHARE

    def _take_ends(self, data: bytes) -> None:
        over = list[AnyOp]()
        for end in records.end_records(data):
            op = self._sent.pop(end.number, None)
            if op is None:  # given up as ABANDONED at the end of the daemon
                continue
            op.outcomes, op.errnos, op.calls = end.outcomes, end.errnos, end.calls
            self._sent_blocks -= op.count
            self._sent_bytes -= op.held_bytes
            if isinstance(op, WriteOp):
                self._sent_writes -= op.count
                self._sent_write_bytes -= op.held_bytes
                op.take_forms(end.codecs, end.stored_lengths, end.checksums)
            over.append(op)
        self._deliver(over)

    def _deliver(self, ops: Sequence[AnyOp]) -> None:
        self._count(ops)
        self._pass_on(ops)

    # --- tasks -----------------------------------------------------------------------------------

    def _do_tasks(self) -> None:
        """Call tasks, which ask the process and wait for it, one after another."""
        while (op := self._tasks.get()) is not None:
            if self._stopping:
                op.outcome = DiskOutcome.CANCELLED
            else:
                self._task_since_s = time.monotonic()
                try:
                    op.call()
                    op.outcome = DiskOutcome.OK
                except OSError as error:
                    op.outcome, op.errno = DiskOutcome.IO_ERROR, error.errno or 5
                finally:
                    self._task_since_s = 0.0
            self._from_thread(lambda op=op: self._task_done(op))  # type: ignore[misc]

    def _task_done(self, op: TaskOp) -> None:
        if op in self._open_tasks:
            del self._open_tasks[op]
            self._deliver([op])

    # --- stopping --------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """See `DiskQueue`."""
        self._stopping = True
        self._tasks.put(None)  # now: its thread should have ended by the time of `stop`
        self.cancel_queued()

    def stop(self, deadline_s: float) -> bool:
        """See `DiskQueue`."""
        self.begin_stop()
        line = self._line
        if line is not None:
            look = select.poll()
            look.register(line, select.POLLIN)
            # What has come by then is taken, even if another directory has used up the time.
            while self._sent and look.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                if not self.readable(line):
                    break
        if line is not None:  # without a process a task only ends when the directory is closed
            self._task_thread.join(max(0.0, deadline_s - time.monotonic()))
        everything_over = not self._sent and (line is None or not self._task_thread.is_alive())
        left: list[AnyOp] = [*self._sent.values(), *self._open_tasks]
        self._sent.clear()
        self._open_tasks.clear()
        for op in left:
            if not isinstance(op, TaskOp) or op.outcome is DiskOutcome.PENDING:
                op.end(0, op.count, DiskOutcome.ABANDONED)
        while self._cancelled:
            self._deliver_cancelled()
        self._deliver(left)
        return everything_over
