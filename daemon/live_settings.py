"""The settings that a daemon runs with: the source of each, and those that can change at run time.

SIGHUP reads file, environment and flags again; `tiercache set` changes one until the next SIGHUP or restart. Either
applies all of it or nothing: an error is reported in one line, and everything stays as it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from tiercache.config.daemon_config import DaemonConfig, Resolved, parse_setting
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError, TierCacheError
from tiercache.protocol.messages import SettingView

from .cache import Cache

log = logging.getLogger("tiercache.daemon")

LIVE = ("log_level", "quota", "nvme_quota")
"""Settings that can change at run time. Keys of clients on other hosts are reloaded by themselves."""
BY_HAND = "tiercache set, until the next reload or restart"


class LiveSettings:
    """Event loop only; files are read by a thread.

    Args:
        running: what the daemon was started with.
        again: reads the settings again. Raises TierCacheError, and may block.
    """

    def __init__(self, running: Resolved, again: Callable[[], Resolved], cache: Cache) -> None:
        self.config, self.sources = running.config, dict(running.sources)
        self._given = running.given
        self._again = again
        self._cache = cache
        self._reloading = asyncio.Lock()

    async def reload(self) -> str:
        """Apply what can change; returns the problem if there is one, which is also logged."""
        async with self._reloading:  # one after the other: the last one read applies
            return await self._reload()

    async def _reload(self) -> str:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(None, self._again)
        except TierCacheError as error:
            log.error("settings were not reloaded, and stay as they were: %s", error)
            return str(error)
        changed = [key for key in LIVE if self._text(self.config, key) != self._text(found.config, key)]
        fields = {SETTINGS[key].field: getattr(found.config, SETTINGS[key].field) for key in LIVE}
        self.sources |= {key: found.sources[key] for key in LIVE}
        told = ", ".join(f"{key} = {self._text(found.config, key)}" for key in changed) or "no change"
        before = log.isEnabledFor(logging.INFO)  # logged at the old or the new level, whichever lets it through
        if before:
            log.info("settings reloaded: %s", told)
        self._take(dataclasses.replace(self.config, **fields))
        if not before:
            log.info("settings reloaded: %s", told)
        for key in changed:
            if note := self._left_out(key):
                log.warning("%s is changed in part: %s", key, note)
        if later := [key for key in SETTINGS if self._differs(found.config, key) and self._is_new(found, key)]:
            log.warning("settings that change with a restart only: %s", ", ".join(later))
        return ""

    def change(self, key: str, text: str) -> str:
        """Change one setting by hand; returns what there is to say of it. Raises ConfigError."""
        if key not in SETTINGS:
            raise ConfigError(f"{key}: there is no such setting; {', '.join(LIVE)} can be set")
        if key not in LIVE:
            raise ConfigError(f"{key} changes with a restart only: {', '.join(LIVE)} can be set while the daemon runs")
        value = parse_setting(key, text, "tiercache set")
        self._take(dataclasses.replace(self.config, **{SETTINGS[key].field: value}))
        self.sources[key] = BY_HAND
        log.info("%s = %s was set", key, self._text(self.config, key))
        return self._left_out(key)

    def _take(self, config: DaemonConfig) -> None:
        self.config = config
        logging.getLogger().setLevel(config.log_level.upper())
        self._cache.space.quotas.change(dict(config.quota))
        self._cache.space.quotas_below.change(dict(config.nvme_quota))

    def _left_out(self, key: str) -> str:
        """Namespaces that a new quota does not apply to."""
        if key == "log_level":
            return ""
        space = self._cache.space
        quotas = space.quotas if key == "quota" else space.quotas_below
        count = 0
        for one in space.namespaces.values():
            wanted = quotas.account_of(one.spec.tenant, one.fingerprint)
            count += wanted != (one.account if key == "quota" else one.account_below)
        if not count:
            return ""
        return f"{count} namespaces stay in the account that they began in until the daemon is restarted"

    async def view(self) -> tuple[list[SettingView], str]:
        """Each setting, with the value that the next start would use; and why that is not known."""
        found, problem = None, ""
        try:
            found = (await asyncio.get_running_loop().run_in_executor(None, self._again)).config
        except TierCacheError as error:
            problem = str(error)
        views = []
        for key in SETTINGS:
            value, other = self._text(self.config, key), None if found is None else self._text(found, key)
            if found is not None and other == value and self._differs(found, key):
                other = f"{value} with another password"
            view = SettingView(key, value, self.sources.get(key, ""), key in LIVE, other if other != value else None)
            views.append(view)
        return views, problem

    def _differs(self, found: DaemonConfig, key: str) -> bool:
        """True if a setting has changed. Texts do not tell: they have no passwords."""
        field = SETTINGS[key].field
        return bool(getattr(self.config, field) != getattr(found, field))

    def _is_new(self, found: Resolved, key: str) -> bool:
        """True if somebody has changed a setting; else its value follows from others that were changed."""
        field = SETTINGS[key].field
        return bool(self._given.get(field) != found.given.get(field))

    @staticmethod
    def _text(config: DaemonConfig, key: str) -> str:
        setting = SETTINGS[key]
        return setting.kind.render(getattr(config, setting.field))
