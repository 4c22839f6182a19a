"""The shared tier's settings, ready for use: the store, the names, the form of values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.tiers.forms.cipher import load_cipher
from tiercache.daemon.tiers.forms.codecs import codec_number
from tiercache.daemon.tiers.shared.stores.store import SharedStore
from tiercache.errors import ConfigError

from .naming import Naming
from .stores import open_store
from .value import ValueForm

_PERSON_OF_NAMES = b"shared-names"


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """See `settings.py` of the configuration for each; `state`: the file of flushes that the store was not told of."""

    store: SharedStore
    naming: Naming
    form: ValueForm
    state: Path
    write: str = "all"
    write_budget_bytes_per_s: int = 0
    lookup_timeout_s: float = 0.02
    ttl_s: float = 86_400.0


def state_name(deployment: str, address: str) -> str:
    """The name of the file of flushes that the store at this address was not told of."""
    return f"shared-flushes-{deployment}-{hashlib.blake2b(address.encode(), digest_size=8).hexdigest()}"


def shared_settings(config: DaemonConfig) -> SharedSettings:
    """Those of a daemon.

    Raises ConfigError for what can never work: a bad URL, a missing library or key, settings that rule each other out.
    """
    cipher = None if config.shared_key is None else load_cipher(config.shared_key, "shared_key")
    secret = b"" if cipher is None else cipher.derived_key(_PERSON_OF_NAMES)
    store = open_store(config.shared.full)
    if config.shared_write == "evicted" and store.pack_blocks > 1:
        text = f"DRAM evicts single blocks, and {store.address} keeps packs of {store.pack_blocks}"
        raise ConfigError(f"shared_write = evicted: {text}: write all or reused, or ?pack=1 in the store's URL")
    return SharedSettings(
        store=store,
        naming=Naming(config.shared_deployment, secret),
        form=ValueForm(cipher, codec_number(config.shared_codec)),
        state=(config.shared_state or config.run_dir) / state_name(config.shared_deployment, store.address),
        write=config.shared_write,
        write_budget_bytes_per_s=config.shared_write_budget_bytes_per_s,
        lookup_timeout_s=config.shared_lookup_timeout_s,
        ttl_s=config.shared_ttl_s,
    )
