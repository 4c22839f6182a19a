"""A folder that hosts share, and what may lie in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from tiercache.daemon.tiers.shared.stores.folder.connection import FolderConnection, FolderStore
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name

NAME = b"tc1:default:5d1e:0a1b:9f"


def connect(folder: Path, query: str = "") -> FolderConnection:
    return FolderStore(f"file://{folder}{query}").connect()


def place(folder: Path, name: bytes = NAME) -> Path:
    """Where a value's file belongs; its folder is made."""
    path = folder / OURS / "values" / fan_out(name) / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def drafts(folder: Path) -> list[str]:
    return os.listdir(folder / OURS / "tmp")


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_PATH)
        try:  # the whole path may be too long for a socket
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": _socket_at,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("/nowhere"),
}
