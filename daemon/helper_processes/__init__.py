"""Child processes that do what may hang in the kernel or crash natively, and a thread that keeps each one running.

    Supervisor ──► HelperProcess ══ control socket ══► run_child ─► serve      start message, lines; Ready, log lines
         │                                                            │
         └ open_line ───────────── line (a socket) ───────────────────┘        what the owner and `serve` agree on

supervisor  starts the process, gives up one that does not answer, starts another after a pause
limits      times and counts that differ between kinds of processes
process     one life of the process, and whether it is really gone
packets     what is said on the control socket
child       what every child does; imports little, for a quick start

Knows nothing of what a child is for: the owner gives its module, and the message that it starts with.
"""
