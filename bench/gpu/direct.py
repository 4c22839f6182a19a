"""GPUDirect on this disk: what the probe finds, whether bytes survive both ways, and the rates beside the bounce."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.place import DEVICE, MIB, REHEARSAL, sized
from gpu.tell import Skip, checking, fact, figure, left_s

SIZES = {"128 KiB": 128 << 10, "2 MiB": 2 * MIB, "16 MiB": 16 * MIB}
COUNT = sized(16, 3)


def run(_: Sequence[str]) -> None:
    """Probe, then move blocks."""
    from tiercache.connector.direct.probe import probe_gds

    with tempfile.TemporaryDirectory(prefix="tiercache-gpu-") as folder:
        probe = probe_gds(folder, timeout_s=min(20.0, left_s() / 3))
        fact("mode", probe.mode.value)
        fact("why nothing better", probe.reason)
        fact("why no direct writes", probe.write_reason)
        fact("loads go directly", probe.use_direct)
        fact("stores go directly", probe.use_direct_store)
        rates = {
            "O_DIRECT into host memory": probe.host_bytes_per_s,
            "direct read": probe.direct_bytes_per_s,
            "read by the bounce": probe.bounce_bytes_per_s,
            "direct write": probe.direct_write_bytes_per_s,
            "write by the bounce": probe.bounce_write_bytes_per_s,
        }
        for name, rate in rates.items():
            if rate:
                figure(name, rate / 1e9, "GB/s")
        for way in ("read", "write"):
            if rates[f"direct {way}"] and rates[f"{way} by the bounce"]:
                figure(f"direct {way} over the bounce", rates[f"direct {way}"] / rates[f"{way} by the bounce"], "x")
        for name, length in SIZES.items():
            with checking(f"blocks of {name} to the disk and back, byte by byte"):
                there_and_back(probe, Path(folder) / name.replace(" ", "-"), length)


def backend_for(probe: Any) -> Any:
    from tiercache.connector.direct.backend import KvikioBackend
    from tiercache.connector.direct.probe import Mode

    if REHEARSAL:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/connector/direct"))
        from host_backend import HostBackend

        return HostBackend()
    if probe.mode is Mode.POSIX:
        raise Skip(probe.reason)
    return KvikioBackend(probe, DEVICE)


def there_and_back(probe: Any, path: Path, length: int) -> None:
    """Write blocks from the device, read them with the host and with the device, and compare all three."""
    import numpy as np
    import torch

    from tiercache.protocol.checksums import lane_sum

    backend = backend_for(probe)
    pool = torch.randint(0, 256, (COUNT, length), dtype=torch.uint8, device=DEVICE)
    back = torch.zeros_like(pool)
    if not REHEARSAL:
        torch.cuda.synchronize()
    host = pool.cpu().numpy()
    path.write_bytes(bytes(COUNT * length) if not probe.write_reason else host.tobytes())
    if not probe.write_reason:
        file = backend.open(str(path), True)
        for number in range(COUNT):
            assert backend.write(file, number * length, pool[number].data_ptr(), length) == length
        backend.close(file)
        written = np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(COUNT, length)
        assert (written == host).all(), "the file does not hold what was on the device"
    file = backend.open(str(path), False)
    for number in range(COUNT):
        assert backend.read(file, number * length, back[number].data_ptr(), length) == length
    backend.close(file)
    assert torch.equal(back, pool), "the device does not hold what is in the file"
    addresses = back.data_ptr() + np.arange(COUNT, dtype=np.int64) * length
    assert backend.lane_sums(addresses, length) == [lane_sum(row.data) for row in host], "sums differ"
