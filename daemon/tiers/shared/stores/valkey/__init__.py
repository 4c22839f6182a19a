"""Valkey and Redis, by a bulk client of our own: values go straight from and into the caller's memory.

    open_valkey(url) ─► ValkeyStore ─► connect() ─► OneServer (connection) or Cluster
                                                       │ commands, pipelined by an Exchange
                                                       └ ValkeyLine: one socket, one deadline for the whole call

store        the store that a URL names
url          what the URL says, and what its user may get wrong
tls          certificates
connection   the calls of the tier, and a connection to one server
cluster      a connection to a cluster: its lines, and redirects
commands     the few commands that we use: how each is written, and how its reply is read
exchange     a pipeline of commands on one line, with bounds on what is under way
line         one socket: finds the host's addresses, connects, sends, receives, until a deadline
tls_line     the same with TLS
refusals     what an error of the server means to the tier

The protocol is RESP2 (https://valkey.io/topics/protocol), and nothing in it beyond what these commands need.
"""

from __future__ import annotations

from .store import open_valkey

__all__ = ["open_valkey"]
