"""The URL of an object store: `s3://bucket/prefix?endpoint=http://host:port&region=eu-central-1`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tiercache.daemon.tiers.shared.stores.queries import read_query, whole_number
from tiercache.errors import ConfigError

PACK_BLOCKS = 16
CONNECTIONS = 4
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._=+/-]*")
_ENDPOINT = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._/-]*)?")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_ACCOUNT = re.compile(r"[A-Za-z0-9-]{3,64}")
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod or instance a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key's file, or give the pod or instance a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give the pod or instance an identity",
}
"""Where credentials belong, by scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """What the URL says.

    Attributes:
        prefix: of all keys, without slashes at its ends.
        config: for obstore's store of this scheme.
        allow_http: the endpoint is without TLS.
        ca: file of a CA to trust besides the system's, in PEM; empty for none.
        pack_blocks: blocks in one object.
        connections: how many transfers run side by side.
    """

    scheme: str
    bucket: str
    prefix: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    allow_http: bool = False
    ca: str = ""
    pack_blocks: int = PACK_BLOCKS
    connections: int = CONNECTIONS

    @property
    def address(self) -> str:
        """The URL without its settings."""
        return f"{self.scheme}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"


def parse_object_url(url: str) -> ObjectSettings:
    """Raises ConfigError."""
    scheme, netloc, path, query, fragment = urlsplit(url)
    example = f"write for example {scheme}://bucket/prefix"
    shown = f"{scheme}://{netloc.rpartition('@')[2]}{path}"
    if "@" in netloc:
        raise ConfigError(f"{shown}: credentials do not belong in the URL: {CREDENTIALS[scheme]}")
    prefix = unquote(path).strip("/")
    if not _BUCKET.fullmatch(netloc):
        raise ConfigError(f"{shown}: {netloc!r} is not a name of a bucket: {example}")
    parts = prefix.split("/") if prefix else []
    if fragment or not _PREFIX.fullmatch(prefix) or {"", ".", ".."} & set(parts):
        raise ConfigError(f"{shown}: its prefix may have letters, digits, . _ = + - and single slashes: {example}")
    known: dict[str, Callable[[str], Any]] = {
        "endpoint": _endpoint,
        "ca": _file,
        "pack": whole_number(1, 256),
        "connections": whole_number(1, 64),
    }
    if scheme == "s3":
        known |= {"region": _like(_REGION, "eu-central-1"), "addressing": _addressing}
    if scheme == "az":
        known |= {"account": _like(_ACCOUNT, "myaccount")}
    found = read_query(shown, query, known)
    config = _config(scheme, found)
    allow_http = found.get("endpoint", "").startswith("http://")
    if allow_http and "ca" in found:
        raise ConfigError(f"{shown}: ca= is for TLS: write endpoint=https://")
    return ObjectSettings(
        scheme=scheme,
        bucket=netloc,
        prefix=prefix,
        config=config,
        allow_http=allow_http,
        ca=found.get("ca", ""),
        pack_blocks=found.get("pack", PACK_BLOCKS),
        connections=found.get("connections", CONNECTIONS),
    )


def _config(scheme: str, found: Mapping[str, str]) -> dict[str, str]:
    names = {"region": "region", "account": "account_name", "endpoint": "base_url" if scheme == "gs" else "endpoint"}
    config = {names[key]: value for key, value in found.items() if key in names}
    if scheme == "s3" and "endpoint" in found:
        config.setdefault("region", "us-east-1")  # what servers other than Amazon's expect
    if found.get("addressing") == "virtual":
        config["virtual_hosted_style_request"] = "true"
    return config


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("is not an address of a server: write for example http://10.0.0.5:9000")
    return text.rstrip("/")


def _file(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("is not an absolute path: write for example /etc/ssl/our-ca.pem")
    return text


def _addressing(text: str) -> str:
    if text not in ("path", "virtual"):
        raise ValueError("must be path or virtual")
    return text


def _like(pattern: re.Pattern[str], example: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"is not understood: write for example {example}")
        return text

    return read
