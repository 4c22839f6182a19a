"""One process's connection to the daemon.

    client      the connection for as long as the process lives: opens sessions, turns failures into misses
      └ session     one life of the daemon: hello, the arena's mapping, requests with deadlines
          ├ channel     requests and replies on the control socket
          ├ mapping     the regions of the arena, and the copies that still need them
          └ leases      leases that this client holds, renewed while they are in use
    launcher    starts a private daemon as a child process

Nothing here interprets a block's bytes. The connector does.
"""

from typing import TYPE_CHECKING

from tiercache.ground.former_names import former_module

if not TYPE_CHECKING:  # `tiercache.client` was a module in 0.1
    __getattr__ = former_module("tiercache.client.client")
