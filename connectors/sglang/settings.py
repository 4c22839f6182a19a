"""Settings of the SGLang connector, in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from tiercache.client.session import REQUEST_TIMEOUT_S
from tiercache.errors import ConfigError

OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
"""Fields beside ours that SGLang leaves there; it removes those that it uses itself."""
LONGEST_S = 8.0
"""SGLang ends if a thread of its storage is at a call for 10 s when it flushes."""


class HiCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a storage backend.

    Attributes:
        address: the daemon's run directory; empty for the default one.
        model_id: identifies the weights; empty to hash the files, or use the commit of a hub.
        salt: secret of a tenant.
        tenant: owner of these blocks, for the daemon's quotas. Only the same tenant finds them.
        media_ids: pages of a model that takes images, sounds or videos are for this `engine` only; or, as SGLang's
            30 bits for each of them are enough for you, for all engines (`content`).
        load_timeout_s: a load of up to 128 pages that takes longer is a miss; at most `LONGEST_S`. With SGLang's
            prefetch policy `timeout` it is never longer than that policy's time for these pages.
        request_timeout_s: deadline of one request to the daemon.
    """

    address: str = ""
    model_id: str = ""
    salt: str = ""
    tenant: str = ""
    media_ids: Literal["engine", "content"] = "engine"
    load_timeout_s: float = LONGEST_S
    request_timeout_s: float = REQUEST_TIMEOUT_S

    @classmethod
    def read(cls, given: dict[str, Any]) -> HiCacheSettings:
        """Raises ConfigError that names what is wrong."""
        where = "hicache-storage-backend-extra-config"
        ours = {name: value for name, value in given.items() if name not in OF_SGLANG}
        for name in ours:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, 1, 0) or [""]
                raise ConfigError(f"{where} has no {name!r}: did you mean {near[0]!r}?")
        if not given.get("interface_v1"):
            raise ConfigError(f'{where} has no "interface_v1": 1, without which SGLang copies pages one by one: set it')
        try:
            settings = msgspec.convert(ours, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from error
        for name in ("load_timeout_s", "request_timeout_s"):
            if not 0 < (value := getattr(settings, name)) <= LONGEST_S:
                raise ConfigError(f"{where}: {name} is {value:g}: set more than 0 and at most {LONGEST_S:g}")
        return settings
