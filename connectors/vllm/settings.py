"""Settings of the connectors for vLLM, in `kv_connector_extra_config` or in an entry of `secondary_tiers`."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from tiercache.client.session import REQUEST_TIMEOUT_S
from tiercache.connector.connector import LOAD_TIMEOUT_S, Connector, connect
from tiercache.errors import ConfigError, DaemonUnavailable


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a connector.

    Attributes:
        address: the daemon's run directory; empty for the default one.
        model_id: identifies the weights; empty to hash the files, or use the commit of a hub.
        salt: secret of a tenant.
        tenant: owner of these blocks, for the daemon's quotas. Only the same tenant finds them.
        load: `auto` loads what is faster loaded than computed, by the recent cost of both; `always` loads all that is
            found.
        media_ids: blocks of requests with images, sounds or videos are for this `engine` only; or, as users give them
            no ids or ids that name their `content`, for all engines.
        load_timeout_s: a load that takes longer is computed instead.
        request_timeout_s: deadline of one request to the daemon.
        gds: `auto` reads from NVMe straight into the GPU where that is faster.
        gds_store: with `gds`, new blocks go from the GPU straight to NVMe too, where that is faster.
        log_requests: a line at INFO for each request that the cache has served: `auto` while they are few, counted
            where they are many; `all`; `off`.
    """

    address: str = ""
    model_id: str = ""
    salt: str = ""
    tenant: str = ""
    load: Literal["auto", "always"] = "auto"
    media_ids: Literal["engine", "content"] = "engine"
    load_timeout_s: float = LOAD_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    gds: str = "off"
    gds_store: bool = False
    log_requests: Literal["auto", "all", "off"] = "auto"

    @classmethod
    def read(cls, given: dict[str, Any]) -> ConnectorSettings:
        """Raises ConfigError that names what is wrong."""
        for name in given:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, 1, 0) or [""]
                raise ConfigError(f"kv_connector_extra_config has no {name!r}: did you mean {near[0]!r}?")
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from error

    def connect(self, **options: Any) -> Connector:
        """A connector with these settings; `options` as for `tiercache.connect`, which see for errors.

        It does not warn that there is no daemon: see `absence`, which is logged once for all processes of an engine.
        """
        return connect(
            self.address or None,
            tenant=self.tenant,
            load_timeout_s=self.load_timeout_s,
            request_timeout_s=self.request_timeout_s,
            warn=False,
            **options,
        )


def absence(connector: Connector) -> str:
    """Why there is no usable daemon; empty when there is."""
    try:
        connector.client.session()
    except DaemonUnavailable as error:
        return str(error)
    return ""
