"""Every exception that tiercache raises.

    TierCacheError
    ├── ConfigError           a setting is wrong; the text names key, value and remedy
    ├── ProtocolError         a message that breaks the protocol (ours or the peer's)
    │   └── VersionError      no protocol version that both sides speak
    ├── RequestRefused        the daemon answered with a typed refusal (see `code`)
    ├── DaemonUnavailable     no daemon at the address, or it died, or the client is down
    │   └── DeadlineExceeded  no answer within the deadline
    ├── CallInterrupted       a signal has ended a call; its caller gets what the signal handler has raised
    ├── ArenaError            shared memory could not be made, mapped or trusted
    ├── CatalogUnavailable    the index of an NVMe directory cannot be read or written now
    ├── DirectoryUnavailable  an NVMe directory cannot be used now; it may be later
    ├── LayoutError           a KV pool whose shape, strides or dtype cannot be served
    └── ModelRefused          the engine cannot serve this model; the text says why

Misses, pending blocks and a full arena are not errors: they are return values.
At an engine's edge (`tiercache.connector.connector`) every one of these becomes a miss.
"""

from __future__ import annotations


class TierCacheError(Exception):
    """Base of everything raised by tiercache."""


class ConfigError(TierCacheError):
    """A setting is wrong. The text names the key, the value and what to do."""


class ProtocolError(TierCacheError):
    """A message that cannot be understood, or that its receiver did not expect."""


class VersionError(ProtocolError):
    """The two sides have no protocol version in common."""


class RequestRefused(TierCacheError):
    """The daemon refused a request; `code` is one of `tiercache.protocol.messages.ErrorCode`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class DaemonUnavailable(TierCacheError):
    """There is no live daemon behind this client."""


class DeadlineExceeded(DaemonUnavailable):
    """The daemon did not answer within the deadline."""


class CallInterrupted(TierCacheError):
    """A signal has ended a waiting call. Its caller gets what the signal handler has raised instead."""


class ArenaError(TierCacheError):
    """Shared memory could not be created, mapped, registered or trusted."""


class CatalogUnavailable(TierCacheError):
    """The index of an NVMe directory cannot be used now (disk full, I/O error, no permission). It was left as it is."""


class DirectoryUnavailable(TierCacheError):
    """An NVMe directory cannot be used now; the text says which file, why, and what to do. It may be used later."""


class LayoutError(TierCacheError):
    """A KV pool that cannot be addressed block by block."""


class ModelRefused(TierCacheError):
    """A model that the engine cannot serve exactly; the text says why and what to do."""
