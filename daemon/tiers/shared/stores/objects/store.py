"""The store in a bucket."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.errors import ConfigError
from tiercache.ground.extras import install_extra

from .connection import ObjectConnection, Shared
from .settings import CREDENTIALS, ObjectSettings, parse_object_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

CONNECT_S = 3
REQUEST_S = 30
"""Time-out of one request. The deadline of the call, which cancels it, is nearly always earlier."""


class ObjectsStore:
    """`SharedStore` in a bucket of S3, Google Cloud Storage or Azure. Raises ConfigError for a wrong URL."""

    def __init__(self, url: str) -> None:
        self.settings = parse_object_url(url)
        self.address = self.settings.address
        self.trouble = ""
        self.pack_blocks = self.settings.pack_blocks
        self.connections = self.settings.connections
        # The tier tries again where that pays. One retry is for a connection that the server has closed meanwhile. No
        # note is written once more: another host may have flushed in between, and what it flushed would be back.
        self._shared = Shared(self.settings, _bucket(self.settings, retries=1), _bucket(self.settings, retries=0))

    def connect(self) -> ObjectConnection:
        return ObjectConnection(self._shared)

    def close(self) -> None:
        """End all requests, without waiting."""
        self._shared.requests.close()


def _bucket(settings: ObjectSettings, retries: int) -> Bucket:
    """Raises ConfigError. Makes no request. `retries`: by obstore itself, of a request that seems to have failed."""
    try:
        from obstore import store
    except ImportError as error:
        text = f"needs the package obstore (Python 3.11 or later): {install_extra('objects')}"
        raise ConfigError(f"{settings.address}: {text}") from error
    authority = {"root_certificate": _read(settings)} if settings.ca else {}
    kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    try:
        bucket: Bucket = kinds[settings.scheme](
            settings.bucket,
            prefix=settings.prefix or None,
            config=dict(settings.config),
            client_options={
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
                **({"allow_http": True} if settings.allow_http else {}),
                **authority,
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=CONNECT_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=20),
                    "max_backoff": timedelta(milliseconds=100),
                    "base": 2,
                },
            },
        )
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        raise ConfigError(f"{settings.address}: {why}: {CREDENTIALS[settings.scheme]}") from error
    return bucket


def _read(settings: ObjectSettings) -> str:
    """The certificates of the CA. Raises ConfigError."""
    try:
        text = Path(settings.ca).read_text(errors="replace")
        problem = "" if "-----BEGIN CERTIFICATE-----" in text else "has no certificate in PEM"
    except OSError as error:
        text, problem = "", str(error.strerror)
    if problem:
        remedy = "name a file of the CA that signed the server's certificate"
        raise ConfigError(f"{settings.address}: ca = {settings.ca}: {problem}: {remedy}")
    return text
