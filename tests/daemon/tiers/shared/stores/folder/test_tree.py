"""A folder that fails: full, forbidden, not mounted, gone. Each is told in one line, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from folder_rig import NAME, connect, drafts
from store_calls import put, soon

from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, as_store_error
from tiercache.daemon.tiers.shared.stores.store import Fate, StoreError, StoreProblem


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOSPC, StoreProblem.FULL),
        (errno.EDQUOT, StoreProblem.FULL),
        (errno.EROFS, StoreProblem.READ_ONLY),
        (errno.EACCES, StoreProblem.DENIED),
        (errno.EPERM, StoreProblem.DENIED),
        (errno.ESTALE, StoreProblem.UNREACHABLE),
        (errno.ENOTCONN, StoreProblem.UNREACHABLE),
        (errno.EIO, StoreProblem.UNREACHABLE),
        (errno.EMFILE, StoreProblem.BUSY),
    ],
)
def test_errors_of_the_file_system_say_which_file_and_what_to_do(number: int, problem: StoreProblem) -> None:
    error = as_store_error("/mnt/kv", OSError(number, os.strerror(number), "values"))
    assert error.problem is problem
    assert error.text.startswith(f"/mnt/kv/{OURS}: values: {os.strerror(number)}: ")
    assert "\n" not in error.text


@pytest.mark.parametrize("when", ["pwritev", "rename"])
def test_a_failed_put_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    line = connect(folder)
    put(line, {b"before": b"value!"})

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, when, fail)
    with pytest.raises(StoreError) as caught:
        put(line, {NAME: b"value!"})
    assert caught.value.problem is StoreProblem.FULL
    assert drafts(folder) == []
    assert line.exists([NAME, b"before"], [], soon()).there == [False, True]


@contextmanager
def files_of_1_mib() -> Iterator[None]:
    """For as short as possible: a tool that watches the tests has files in this process too."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def test_a_value_that_is_too_long_for_the_file_system_is_refused_alone(folder: Path) -> None:
    line = connect(folder)
    with files_of_1_mib():
        fates = put(line, {b"big": bytes(2 << 20), b"small": b"value!"})
    assert fates == [Fate.REFUSED, Fate.DONE]
    assert line.exists([b"big", b"small"], [], soon()).there == [False, True]
    assert drafts(folder) == []


def test_a_full_disk_is_told(mount: Callable[[str], Path]) -> None:
    line = connect(mount("1m"))
    with pytest.raises(StoreError, match="make room") as caught:
        put(line, {b"%d" % number: bytes(300_000) for number in range(5)})
    assert caught.value.problem is StoreProblem.FULL
    assert line.exists([b"0", b"4"], [], soon()).there == [True, False]


def test_a_folder_that_is_not_mounted_any_more_gets_no_values(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    place_ = mount("4m")
    line = connect(place_)
    put(line, {NAME: b"value!"})
    subprocess.run(["umount", str(place_)], check=True, timeout=30)
    with pytest.raises(StoreError, match="not mounted any more"):
        put(line, {NAME: b"value!"})
    assert list(place_.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place_)], check=True, timeout=30)
