"""One process's connection to the daemon.

    client      requests, for as long as the process lives; a failure is an error at once, or soon
      ├ self_report  what this process tells the daemon of itself
      └ keeper      opens sessions, brings them back, and ends them: UP and DOWN
          ├ leases      leases that this client holds, renewed while they are in use
          └ session     one life of the daemon: hello, the arena's mapping, requests with deadlines
              ├ channels    requests and replies; a `channel` is one socket
              └ mapping     the regions of the arena, and the copies that still need them
    launcher    starts a private daemon as a child process

Nothing here interprets a block's bytes. The connector does.
"""
