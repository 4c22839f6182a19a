"""Which versions of SGLang are served. This imports nothing else of SGLang, whose other versions have other modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sglang
from tiercache.errors import VersionError

VERSION: str = sglang.__version__
SERVED = ("0.5.23",)


def check_version(version: str = VERSION) -> None:
    """Raise VersionError for an SGLang that was not tried."""
    if version not in SERVED:
        served = " or ".join(SERVED)
        raise VersionError(f"tiercache's connector serves sglang {served}, and this is {version}: install one of those")


@contextmanager
def of_served_versions() -> Iterator[None]:
    """Around imports: where another version does not have them, VersionError says so."""
    try:
        yield
    except ImportError:
        check_version()
        raise
