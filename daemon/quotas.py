"""How much of the arena each tenant may have.

A tenant with a quota has eviction policies of its own, so that it can make room among its own blocks; all others
share theirs. What counts is frames: of blocks that are here, and of those being stored.
"""

from __future__ import annotations

from collections.abc import Mapping

EVERY_OTHER = "*"
"""In the setting: each tenant that is not named there. Clients that name no tenant have no quota."""


class Quotas:
    """Limits in bytes by tenant, as `DaemonConfig.quota` gives them."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._every_other = self._limits.pop(EVERY_OTHER, None)

    def limit(self, tenant: str) -> int | None:
        """What a tenant may have, or None for all there is."""
        if not tenant or not (self._limits or self._every_other is not None):
            return None
        return self._limits.get(tenant, self._every_other)

    def account(self, tenant: str) -> str:
        """Whose eviction order a tenant's blocks are in: its own, or that of all without a quota."""
        return tenant if self.limit(tenant) is not None else ""
