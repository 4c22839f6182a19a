"""Whether Mooncake's library can be loaded. As a script, a try to do so."""

from __future__ import annotations

import subprocess

from tiercache.errors import ConfigError
from tiercache.ground.extras import install_extra
from tiercache.ground.isolated import python_command

LOAD_S = 60.0


def check_library(address: str) -> None:
    """Raises ConfigError. In a process of its own: a native library of that size has no place in the daemon."""
    try:
        loaded = subprocess.run(
            python_command(__name__), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOAD_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{address}: Mooncake's library could not be tried: {error}") from None
    if loaded.returncode == 0:
        return
    why = (loaded.stderr.strip().splitlines() or [f"status {loaded.returncode}"])[-1][:200]
    if "No module named" in why:
        raise ConfigError(f"{address}: needs Mooncake's client: {install_extra('mooncake')}")
    advice = "install libibverbs1, librdmacm1 and libnuma1 (Debian's names)"
    raise ConfigError(f"{address}: Mooncake's client cannot be loaded ({why}): {advice}")


if __name__ == "__main__":
    import mooncake.store  # noqa: F401
