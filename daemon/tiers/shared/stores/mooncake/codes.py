"""The error codes of Mooncake's client, as fates and StoreErrors. Success is 0, or a count."""

from __future__ import annotations

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreError, StoreProblem

NO_ROOM = -200
INVALID = -600
"""The buffer is too small for the value, among others."""
_OBJECT_CODES = range(-799, -699)
"""About one value alone: it is not there, not whole yet, or in use."""
_TRANSFER_CODES = range(-899, -799)
"""The host that has the value, or that should have it, does not answer."""
_MASTER_CODES = range(-999, -899)
MASTER_TIMEOUT = -901


def fate_of_read(code: int, room: int) -> Fate:
    """What became of a value that was to be read. Raises StoreError."""
    if 0 < code <= room:
        return Fate.DONE
    if code == INVALID or code > room:
        return Fate.MISFIT
    if code == 0 or code in _OBJECT_CODES or code in _TRANSFER_CODES:
        return Fate.MISSING
    raise failure(code)


def fate_of_write(code: int) -> Fate:
    """What became of a value that was to be written. Raises StoreError."""
    if code == 0:
        return Fate.DONE
    if code == INVALID or code in _OBJECT_CODES or code in _TRANSFER_CODES:
        return Fate.REFUSED
    raise failure(code)


def is_of_master(code: int) -> bool:
    """Whether the master was not reached: then no call works."""
    return code in _MASTER_CODES


def is_of_object(code: int) -> bool:
    """Whether it is about one value alone."""
    return code in _OBJECT_CODES


def is_of_transfer(code: int) -> bool:
    """Whether it is the host with the value that was not reached."""
    return code in _TRANSFER_CODES


def failure(code: int) -> StoreError:
    """What a call raises for a code that concerns all values."""
    if code == MASTER_TIMEOUT:
        return StoreError(StoreProblem.TIMEOUT, "the master did not answer in time")
    if code in _MASTER_CODES:
        return StoreError(StoreProblem.UNREACHABLE, "the master is not reached")
    if code == NO_ROOM:
        text = "the pool of the hosts is full: give it more memory (segment), or wait until the master has evicted"
        return StoreError(StoreProblem.FULL, text)
    if code in _TRANSFER_CODES:
        return StoreError(StoreProblem.BUSY, f"the host with the value does not answer (code {code})")
    return StoreError(StoreProblem.PROTOCOL, f"Mooncake's client failed with code {code}")
