"""How much of a tier each tenant may have, or each namespace that is named.

    team-a=16GiB          a tenant, all its namespaces together
    ns:5d1e0b3a=4GiB      the namespaces whose fingerprint starts so (`tiercache ls`), apart from their tenant's
    *=1GiB                each other tenant

Who has a limit is an *account*: it has eviction policies of its own, so that it can make room among its own blocks;
all without a limit share theirs. What counts in DRAM is frames, each from when it is given until it is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

EVERY_OTHER = "*"
"""In the setting: each tenant that is not named there. Clients that name no tenant have no quota."""
NAMESPACE = "ns:"
"""In the setting: what follows is how a fingerprint starts. No tenant may be called so (`NamespaceSpec.problem`)."""
NOBODY = ""
"""The account of all that have no limit."""


class Quotas:
    """Limits in bytes for one tier, as `DaemonConfig.quota` gives them, and who is under which.

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
        """Other limits from now on. Namespaces keep their accounts: one that is in none has no limit."""
        self._limits = dict(limits)
        self._every_other = self._limits.pop(EVERY_OTHER, None)
        # The longest first: of two that fit, the one that says more.
        self._starts = sorted((name for name in self._limits if name.startswith(NAMESPACE)), key=len, reverse=True)
        for name in self._limits:
            self.members.setdefault(name, [])
            self.numbers.setdefault(name, len(self.numbers) + 1)

    def enter(self, number: int, tenant: str, fingerprint: str) -> str:
        """The account of a new namespace."""
        account = self.account_of(tenant, fingerprint)
        if account != NOBODY:
            self.members.setdefault(account, []).append(number)
            self.numbers.setdefault(account, len(self.numbers) + 1)
        return account

    def account_of(self, tenant: str, fingerprint: str) -> str:
        """Whose limit such a namespace is under if it is new."""
        for name in self._starts:
            if fingerprint.startswith(name.removeprefix(NAMESPACE)):
                return name
        limited = bool(tenant) and (tenant in self._limits or self._every_other is not None)
        return tenant if limited else NOBODY

    def limit_bytes(self, account: str) -> int | None:
        """What an account may have, or None for all there is."""
        if account == NOBODY or (account.startswith(NAMESPACE) and account not in self._limits):
            return None
        return self._limits.get(account, self._every_other)
