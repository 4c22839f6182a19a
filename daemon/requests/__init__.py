"""From bytes on a socket to an answer.

    sessions (unix socket), remote (TCP)     who asks
        ↓
    router ──► service ──► reads, writes, admin     one method for each request
      └ unsent      └ slow       └ context: what they all need
    stats: the tree that `tiercache stats` shows. tiercache/http/families.py makes metrics of it.
    replies: bounded, sent when the peer takes them; requests that took long, told
"""
