"""`tiercache top`: what a daemon does, live.

    command ──► screen ──► readings of the daemon ──► history ──► view ──► frame, text for a terminal
                  ▲                                                          │
                  └── keys, signals                                          ▼ printed

`command` is only the declaration, so that its help needs no rich. `history` remembers earlier readings for rates and
bars; `view` draws and keeps nothing.
"""
