"""A line with TLS."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Sequence
from itertools import groupby

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.errors import ConfigError

from .line import LATE_S, Part, ValkeyLine
from .tls import Tls
from .url import Place

JOINED_BYTES = 4096
"""Parts up to this length are copied together: each call makes a record of its own."""


class TlsLine(ValkeyLine):
    """A `ValkeyLine` whose bytes are encrypted; it verifies the server's certificate and the name in it."""

    def __init__(self, place: Place, tls: Tls) -> None:
        super().__init__(place)
        self._tls = tls
        self._link: ssl.SSLSocket | None = None
        self._timeout_s = 0.0

    def _secure(self) -> None:
        assert self._socket is not None
        try:
            context = self._tls.context()
        except ConfigError as error:
            raise StoreError(StoreProblem.DENIED, f"{self.place}: {error}") from None
        try:
            with self._lock:  # the plain socket ends here
                self._link = context.wrap_socket(
                    self._socket, server_hostname=self.place.host, do_handshake_on_connect=False
                )
                self._socket = self._link
            self._link.settimeout(self._left_s("no connection in time"))
            self._link.do_handshake()
        except ssl.SSLCertVerificationError as error:
            text = (
                f"its certificate is not valid for us: {error.verify_message}: name the CA that signed it with ?ca=FILE"
            )
            raise StoreError(StoreProblem.DENIED, f"{self.place}: {text}") from None
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError | None) -> StoreError:
        if self._link is not None and isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
            text = f"{self.place}: no end of the TLS handshake in time: does this port speak TLS?"
            return StoreError(StoreProblem.TIMEOUT, text)
        if isinstance(error, ssl.SSLEOFError):
            return super()._lost(None)
        if self._ended or not isinstance(error, ssl.SSLError):
            return super()._lost(error)
        reason = (error.reason or "TLS failed").replace("_", " ").lower()
        if "alert" in reason:  # the server's own word: it wants another certificate of us
            remedy = (
                "check cert= and key=" if self._tls.has_certificate else "name our certificate: ?cert=FILE&key=FILE"
            )
            return StoreError(StoreProblem.DENIED, f"{self.place}: it refuses us ({reason}): {remedy}")
        text = f"{reason}: does this port speak TLS? valkey:// is without"
        return StoreError(StoreProblem.PROTOCOL, f"{self.place}: {text}")

    @property
    def _unheard(self) -> str:
        return "is the store up, and its URL right? If it wants a certificate of us, name one: ?cert=FILE&key=FILE"

    @property
    def has_more(self) -> bool:
        return super().has_more or (self._link is not None and self._link.pending() > 0)

    def send(self, parts: Sequence[Part]) -> None:
        joined: list[Part] = []
        for small, run in groupby(parts, lambda part: memoryview(part).nbytes <= JOINED_BYTES):
            if small:
                joined.append(b"".join(run))
            else:
                joined += run
        super().send(joined)

    def _send(self, views: list[memoryview]) -> int:
        assert self._link is not None
        self._tell_python(self._link)
        try:
            return self._link.send(views[0]) if views[0] else 0
        except TimeoutError:
            self._timeout_s = 0.0
            return 0
        except OSError as error:
            raise self._lost(error) from None

    def _receive(self, views: list[memoryview], flags: int) -> int:
        assert self._link is not None
        self._tell_python(self._link)
        try:
            received = self._link.recv_into(next(view for view in views if view))
        except TimeoutError:
            self._timeout_s = 0.0
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not received:
            raise self._lost(None)
        self._heard = True
        return received

    def _tell_python(self, link: ssl.SSLSocket) -> None:
        left_s = self._left_s()
        if not 0 < self._timeout_s <= left_s + LATE_S:
            link.settimeout(left_s)
            self._timeout_s = left_s
