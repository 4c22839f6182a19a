"""Quotas: how much of a tier each tenant may have, or each namespace that is named.

    team-a=16GiB          a tenant, all its namespaces together
    ns:5d1e0b3a=4GiB      the namespaces whose fingerprint starts so (`tiercache ls`), apart from their tenant's
    *=1GiB                every other tenant

The owner of a limit is an *account*. It has eviction policies of its own, so that it can make room among its own
blocks; everything without a limit shares one account. In DRAM frames count, from when they are taken until they are
free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

EVERY_OTHER = "*"
"""In the setting: every tenant not named there. Clients that name no tenant have no quota."""
NAMESPACE = "ns:"
"""In the setting: prefix of a fingerprint's beginning. No tenant's name may start so (`NamespaceSpec.problem`)."""
UNLIMITED = ""
"""The account of everything without a limit."""


class Quotas:
    """Limits in bytes for one tier, as `DaemonConfig.quota` gives them, and the namespaces under each.

    Attributes:
        members: numbers of namespaces, by account.
        numbers: of the accounts, for the allocator; from 1 on.
        refused: blocks that were not stored for want of room, by account.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.members: dict[str, list[int]] = {}
        self.numbers: dict[str, int] = {}
        self.refused: Counter[str] = Counter()
        self.change(limits)

    def change(self, limits: Mapping[str, int]) -> None:
        """Replace the limits. Namespaces keep their accounts: one whose account has no limit any more is unlimited."""
        self._limits = dict(limits)
        self._every_other = self._limits.pop(EVERY_OTHER, None)
        # Longest first: of two matching prefixes the more specific one counts.
        self._starts = sorted((name for name in self._limits if name.startswith(NAMESPACE)), key=len, reverse=True)
        for name in self._limits:
            self.members.setdefault(name, [])
            self.numbers.setdefault(name, len(self.numbers) + 1)

    def enter(self, number: int, tenant: str, fingerprint: str) -> str:
        """Add a new namespace; returns its account."""
        account = self.account_of(tenant, fingerprint)
        if account != UNLIMITED:
            self.members.setdefault(account, []).append(number)
            self.numbers.setdefault(account, len(self.numbers) + 1)
        return account

    def account_of(self, tenant: str, fingerprint: str) -> str:
        """The account that such a namespace gets if it is new."""
        for name in self._starts:
            if fingerprint.startswith(name.removeprefix(NAMESPACE)):
                return name
        limited = bool(tenant) and (tenant in self._limits or self._every_other is not None)
        return tenant if limited else UNLIMITED

    def limit_bytes(self, account: str) -> int | None:
        """The limit of an account, or None for no limit."""
        if account == UNLIMITED or (account.startswith(NAMESPACE) and account not in self._limits):
            return None
        return self._limits.get(account, self._every_other)
