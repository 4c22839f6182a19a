"""The processes of the demo: they start, or say why not, and end with the demo however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import state_of, wait_until

from tiercache.demo import valkey
from tiercache.errors import ConfigError


def test_a_store_has_a_password_that_others_cannot_see_and_ends_with_its_parent(tmp_path: Path) -> None:
    try:
        valkey.server_program()
    except ConfigError as error:
        pytest.skip(str(error))
    script = (
        "import sys, signal; from pathlib import Path; from tiercache.demo.valkey import ValkeyProcess\n"
        "store = ValkeyProcess(Path(sys.argv[1]), 1 << 24)\n"
        "print(store.process.pid, store.url, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        password = url.split(":")[2].partition("@")[0]
        assert password not in Path(f"/proc/{pid}/cmdline").read_text()
        assert (tmp_path / "valkey.conf").stat().st_mode & 0o077 == 0
        parent.kill()
    wait_until(lambda: state_of(pid) in ("", "Z"), "the store has ended")
