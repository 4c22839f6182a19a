"""Settings of `tiercache serve`: each wrong setting gives one line that says what to set instead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tiercache.errors import ConfigError
from tiercache.serve.settings import ServeSettings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": Path("/nonexistent")}, "is not a folder"),
    ({"port": -1}, r"port is -1: must be 0 \(any\) to 65535"),
    ({"port": 65536}, "port is 65536"),
    ({"max_queued_requests": 0}, "max_queued_requests is 0: must be at least 1"),
    ({"grace_s": -0.1}, "grace is -0.1: must be 0 or more seconds"),
    ({"grace_s": math.inf}, "grace is inf"),
    ({"grace_s": math.nan}, "grace is nan"),
    ({"stall_timeout_s": 0.0}, "stall_timeout is 0.0: must be above 0 seconds"),
    ({"stall_timeout_s": math.nan}, "stall_timeout is nan"),
    ({"daemon": Path("/run/tiercache"), "cache": False}, "daemon and no-cache contradict each other"),
    ({"daemon": Path("/run/tiercache"), "nvme": "/mnt/a"}, "nvme is for a private daemon"),
    ({"cache": False, "nvme": "/mnt/a"}, "nvme is for a private daemon"),
    ({"nvme_size": "1GiB"}, "there is no nvme directory: give nvme too"),
    ({"arena": "much"}, "arena: .*much"),
    ({"nvme": "/mnt/a", "nvme_size": "much"}, "nvme_size: .*much"),
]


@pytest.mark.parametrize(("given", "text"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        ServeSettings(**{"model": tmp_path, **given})
    assert "\n" not in str(refused.value)


def test_a_chat_template_that_cannot_be_read_is_said_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none", binary, tmp_path):
        with pytest.raises(ConfigError, match=f"chat_template {path} cannot be read"):
            ServeSettings(model=tmp_path, chat_template=path).read_chat_template()
