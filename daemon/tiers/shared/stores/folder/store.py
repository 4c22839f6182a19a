"""The store on a shared folder: as the daemon has it, and as it is in its helper process."""

from __future__ import annotations

import os
from collections.abc import Callable

from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore

from .connection import FolderConnection
from .janitor import Janitor
from .settings import parse_folder_url


class FolderStore:
    """`store.Store` on a folder. Its calls may hang with the file system: `shared_folder` runs it in a helper."""

    pack_blocks = 1
    trouble = ""

    def __init__(self, url: str) -> None:
        self.settings = parse_folder_url(url)
        self.address = f"file://{self.settings.path}"
        self.connections = self.settings.connections

    def connect(self) -> FolderConnection:
        return FolderConnection(self.settings)

    def close(self) -> None:
        """Its connections share nothing."""

    def run_beside(self, tell: Callable[[str], bool]) -> None:
        """The janitor; never returns. The helper runs it in a thread. `tell`: see `Janitor.run`."""
        Janitor(self.settings).run(tell)


def folder_in_helper(url: str) -> FolderStore:
    """The store, in a process of its own: the modes of files follow those of the folder, and no mask."""
    os.umask(0)
    return FolderStore(url)


def shared_folder(url: str) -> HelperStore:
    """The store, as the daemon has it. Raises ConfigError."""
    settings = parse_folder_url(url)
    return HelperStore(f"{__name__}:folder_in_helper", url, f"file://{settings.path}", settings.connections)
