"""The parts, what unblocks most first."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One process of the run.

    Attributes:
        module: of this package, with a function `run`; `arguments` are its own.
        limit_s: it is killed after this, or earlier if the run's deadline is near.
        least_s: with less time left it is not begun; earlier parts leave it that much.
        beside: it runs side by side with the part before it. Only for parts that measure nothing.
    """

    name: str
    what: str
    module: str
    limit_s: float
    least_s: float
    arguments: tuple[str, ...] = ()
    beside: bool = False


def pytest_part(name: str, what: str, files: str, workers: int, *, beside: bool = True) -> Part:
    """Test files of tests/gpu, with so many of them at a time."""
    return Part(f"tests {name}", what, "gpu_tests", 130, 30, (str(workers), *files.split()), beside)


PARTS = (
    Part("environment", "driver, torch, Triton, limits, disk: what is here", "environment", 60, 20),
    Part("registering", "the arena registered by two processes at once, its daemon killed", "registering", 110, 15),
    pytest_part(
        "kernels", "each attention and write kernel against its twin", "test_gpu_attention.py", 6, beside=False
    ),
    pytest_part("block copy", "gather, scatter and checksums against their twins", "test_gpu_block_copy.py", 2),
    pytest_part("copies", "the copier and the connector", "test_gpu_copier.py test_gpu_connector.py", 2),
    pytest_part("engine", "the engine: text of generate(), graphs, formats", "test_gpu_engine.py", 3),
    pytest_part("GPUDirect", "direct loads and stores", "test_gpu_gds.py", 1),
    Part("transfers", "blocks between host and device over the pinned peak, and beside compute", "transfers", 60, 20),
    Part("engine", "a model of 8B: decode, prefill, graphs, TTFT by tier", "engine", 120, 45),
    Part("direct", "GPUDirect on this disk: mode, bytes, rates", "direct", 45, 15),
    Part("engines", "vLLM on this GPU, where it is installed", "engines", 60, 3),
    Part("faults", "killed daemons and clients, late copies, no memory", "faults", 75, 20),
    Part(
        "block copy rates",
        "kernels over the memory's bandwidth, copies over the bus's",
        "benchmarks",
        45,
        15,
        ("block_copy",),
    ),
    Part(
        "attention rates",
        "decode over the memory's bandwidth, prefill over torch's",
        "benchmarks",
        60,
        15,
        ("attention",),
    ),
)
