"""The memory of hosts as one store, by Mooncake (`mooncake://master:50051`), in a helper process.

    daemon ── line ──► helper process: worker ─► connection ─► Mooncake's client ──► master      where values are
                                                                     └───────────► other hosts  the values themselves

settings    the URL
client      Mooncake's client in the helper process: starts it, says whether it works, ends the process if it never will
codes       its error codes, as fates and StoreErrors
connection  the store's calls
library     whether Mooncake's library can be loaded
store       puts these together

What the client registers, any process on the network may read and write, without credentials: the part of this host's
memory that the pool has, and the staging buffers of the helper process. Never the arena, which that process has not
mapped. So values are as untrusted as those of any store, and networks must be trusted.

A stored value is never replaced, so no reader sees a part of one. Notes are: Mooncake then writes into the memory that
others read from at the same moment. So a note has a checksum before it, and one that does not fit is read again.
"""
