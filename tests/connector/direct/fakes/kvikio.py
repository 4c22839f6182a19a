"""The part of kvikio that the probe uses, over host memory; $FAKE_KVIKIO sets its behaviour.

`gds=hang,compat=lie`: for each of cuFile's modes one of ok, fail, hang, lie (wrong bytes), short, die.
`write=lie`: one of ok, fail, lie, short of writing, in either mode; ok by default.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import Any

_SETTINGS = json.loads(Path(os.environ["CUFILE_ENV_PATH_JSON"]).read_text())
_MODE = "compat" if _SETTINGS["properties"]["allow_compat_mode"] else "gds"
_BEHAVIOURS = dict(pair.split("=") for pair in os.environ["FAKE_KVIKIO"].split(","))
_BEHAVIOUR = _BEHAVIOURS[_MODE]
_WRITING = _BEHAVIOURS.get("write", "ok")
assert os.environ["KVIKIO_COMPAT_MODE"] == "OFF"


class CuFile:
    def __init__(self, path: str, flags: str) -> None:
        assert flags in ("r", "r+")
        if _BEHAVIOUR == "fail" or (flags == "r+" and _WRITING == "fail"):
            raise RuntimeError("KvikIO failure at: file_handle.cpp:1:\n driver not open")
        if _BEHAVIOUR == "die":
            os.abort()
        while _BEHAVIOUR == "hang":
            signal.pause()
        self._fd = os.open(path, os.O_RDONLY if flags == "r" else os.O_RDWR)

    def raw_read(self, buffer: Any, size: int, file_offset: int) -> int:
        address, _ = buffer.__cuda_array_interface__["data"]
        view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        count = os.preadv(self._fd, [view], file_offset)
        if _BEHAVIOUR == "lie":
            view[0] ^= 1
        return count - (_BEHAVIOUR == "short")

    def raw_write(self, buffer: Any, size: int, file_offset: int) -> int:
        address, _ = buffer.__cuda_array_interface__["data"]
        source = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        data = bytearray(source)
        data[-1] ^= _WRITING == "lie"
        return os.pwrite(self._fd, data, file_offset) - (_WRITING == "short")

    def close(self) -> None:
        os.close(self._fd)
