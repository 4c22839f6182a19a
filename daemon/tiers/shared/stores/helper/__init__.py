"""Runs a store in a process of its own, for stores whose calls hang in the kernel or crash natively.

    HelperConnection ── line (a socket) ──► worker thread ─► the store's own Connection      one of each per connection
           │  pwritev, preadv                    │ mmap
           └──────────► staging (a memfd) ◄──────┘           values pass through this, never through the arena

messages    what is said on the lines
lines       the daemon's end of a line: deadlines, and its staging buffer
connection  the store's calls, as messages, and `HelperStore`, which puts these together
supervisor  keeps the process running (daemon/helper_processes), and tells its problems as a store's
child       the process

Nothing in the daemon waits for the process beyond a call's deadline. A call that is late costs its line: the worker may
still be in the kernel, so its staging buffer is never used again, and a new line gets a new worker and a new buffer. A
worker that comes back finds its line closed and ends. Where too many do not come back, or none has answered for a
while, the process is killed without waiting for its end.
"""
