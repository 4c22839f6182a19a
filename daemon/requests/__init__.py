"""Request handling: from bytes on a socket to an answer.

sessions (unix socket), remote (TCP)     who the client is
    ↓
router ──► service ──► reads, writes, admin, flushes     one method for each request
  └ unsent      └ slow       └ context: what they all need; store_waits: requests that a shared store may lengthen
stats: the tree that `tiercache stats` shows. tiercache/http/families.py makes metrics of it.
A new request: a struct in tiercache/protocol/messages, which names its reply; a method in one of the four and in its
`methods()`; a row in ../PROTOCOL.md; and a place in service.FOR_TENANTS, if clients on other hosts may send it.
unsent: bounds the replies that a peer has not read yet; slow: logs requests that took long
"""
