"""Certificates of a store with TLS. The server's is always verified, against the system's authorities or `ca`."""

from __future__ import annotations

import os
import ssl
import threading

from tiercache.errors import ConfigError

_Stamp = tuple[tuple[int, int, int], ...]


class Tls:
    """The files that a URL names. Thread-safe.

    They are read when the URL is read, so that a mistake in them is a ConfigError, and again once they have changed:
    certificates that expire are replaced while the daemon runs.
    """

    def __init__(self, ca: str, cert: str, key: str) -> None:
        self._ca, self._cert, self._key = ca, cert, key
        self._lock = threading.Lock()
        self._stamp: _Stamp = ()
        self._context: ssl.SSLContext | None = None
        self.context()

    @property
    def has_certificate(self) -> bool:
        """True if there is a certificate of this host to show to the server."""
        return bool(self._cert)

    def context(self) -> ssl.SSLContext:
        """The settings for a new connection. Raises ConfigError."""
        with self._lock:
            stamp = tuple(_stamp(name, path) for name, path in self._files())
            if self._context is None or stamp != self._stamp:
                self._context = self._read()
                self._stamp = stamp
            return self._context

    def _files(self) -> list[tuple[str, str]]:
        named = (("ca", self._ca), ("cert", self._cert), ("key", self._key))
        return [(name, path) for name, path in named if path]

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca or None)
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            raise ConfigError(f"ca = {self._ca}: it has no certificate: give a PEM file with the CA's") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._cert:
            try:
                context.load_cert_chain(self._cert, self._key or None, password=_no_password)
            except _Locked:
                text = f"key = {self._key or self._cert}: it has a password: give a key without one"
                raise ConfigError(text) from None
            except (OSError, ValueError):
                text = f"cert = {self._cert}: give PEM files with a certificate and the private key that belongs to it"
                raise ConfigError(text) from None
        return context


class _Locked(Exception):
    """A private key that is encrypted."""


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise _Locked


def _stamp(name: str, path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such file"
        raise ConfigError(f"{name} = {path}: {reason}: name a file that the daemon can read") from None
    return status.st_mtime_ns, status.st_size, status.st_ino
