"""One process's connection to the daemon.

    client      the connection for as long as the process lives: sessions come and go, failures become misses
      └ session     one life of the daemon: hello, the arena's mapping, requests with deadlines
          ├ channel     requests and replies on the control socket
          ├ mapping     the regions of the arena, and which copies still need them
          └ leases      what this client holds at the daemon, renewed while it is in use
    launcher    starts a private daemon as a child process

Nothing here knows what a block's bytes mean. The connector does.
"""

from typing import TYPE_CHECKING

from tiercache.ground.former_names import former_module

if not TYPE_CHECKING:  # `tiercache.client` was a module in 0.1
    __getattr__ = former_module("tiercache.client.client")
