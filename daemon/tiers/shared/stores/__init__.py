"""Stores that hosts share: the interface in `store`, and a folder for each kind of store that implements it.

store      the interface, and how a store's failures are told
valkey/    Valkey, Redis and what speaks like them, over sockets of our own
folder/    a directory on a file system that hosts share, in a helper process
objects/   S3, Google Cloud Storage and Azure, by obstore
helper/    a process for stores whose calls may hang in the kernel, or crash

names      names of values as names of files and objects
queries    the settings behind the question mark of a URL

A new kind of store is a folder with its settings (the parts of the URL), a connection (`store.Connection`) and a store
(`store.SharedStore`); its schemes and a branch in `open_store`, and its URL in `_EXAMPLES`. It needs besides:

- `helper/` to run it, if its calls may hang in the kernel: see `folder/`;
- then also `daemon/processes.py`, `copies.arena.Beside` and the chart's `_container.tpl`, which count such processes;
- for a package, an extra in pyproject.toml, which an error names by `ground.extras.install_extra`: see `objects/`; its
  version in constraints.txt, and a line for mypy where it has no types;
- a row in `KINDS` of tests/daemon/tiers/shared/stores/test_store.py, which tests what `store` promises, and its URLs in
  `test_names.py` there;
- OPERATING.md, SHARED_FORMAT.md, README.md, and `_REMEDIES` in tiercache/cli/doctor/store.py where a failure is new.
"""

from __future__ import annotations

from tiercache.errors import ConfigError

from .store import SharedStore

VALKEY = ("valkey", "valkeys", "redis", "rediss", "unix", "valkey+cluster", "valkeys+cluster")
OBJECTS = ("s3", "gs", "az")
_EXAMPLES = "valkey://host:6379, s3://bucket/prefix or file:///mnt/shared/kv"


def open_store(url: str) -> SharedStore:
    """The store of a URL. Uses no network; raises ConfigError for a URL that can never work."""
    scheme = url.partition("://")[0]
    if scheme in VALKEY:
        from .valkey import open_valkey

        return open_valkey(url)
    if scheme in OBJECTS:
        from tiercache.daemon.tiers.shared.stores.objects.store import ObjectsStore

        return ObjectsStore(url)
    if scheme == "file":
        from tiercache.daemon.tiers.shared.stores.folder.connection import shared_folder

        return shared_folder(url)
    raise ConfigError(f"shared: no kind of store is called {scheme!r}: write for example {_EXAMPLES}")
