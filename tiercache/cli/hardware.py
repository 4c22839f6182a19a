"""The machine for `plan` and `replay`: a GPU, its bus, the host's memory and disks."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes, parse_duration_s
from tiercache.plan.known import GPUS, Gpu, find, unknown

DEFAULT_TFLOPS = 312.0
DEFAULT_BUS = "25GB"

KvDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", metavar="auto|bf16|fp8|int8|int4", help="Data type of the KV.")
]
Tflops = Annotated[
    float | None,
    typer.Option("--tflops", metavar="N", help="Dense 16-bit TFLOPS of a GPU (default: those of --gpu, or 312)."),
]
Mfu = Annotated[float, typer.Option("--mfu", metavar="SHARE", help="Share of that which a prefill reaches.")]
Bus = Annotated[
    str | None,
    typer.Option("--bus", metavar="SIZE", help="Bytes per second to each GPU (default: those of --gpu, or 25GB)."),
]
DramBandwidth = Annotated[
    str, typer.Option("--dram-bandwidth", metavar="SIZE", help="Bytes per second from host memory.")
]
NvmeBandwidth = Annotated[
    str, typer.Option("--nvme-bandwidth", metavar="SIZE", help="Bytes per second of all disks together.")
]
SharedBandwidth = Annotated[
    str,
    typer.Option(
        "--shared-bandwidth", metavar="SIZE", help="Bytes (1GB) or bits (10Gbit) per second from the shared store."
    ),
]
SharedRoundTrip = Annotated[
    str, typer.Option("--shared-round-trip", metavar="TIME", help="Time until the shared store has answered.")
]
"""Options with the same meaning in both commands."""

_BITS = {"kbit": "kB", "mbit": "MB", "gbit": "GB", "tbit": "TB"}


def find_gpu(name: str, tflops: float | None, bus: str | None) -> Gpu:
    """A GPU by its name or memory size, with the other options for it applied. Raises ConfigError."""
    known = find(name, GPUS)
    if known is not None:
        gpu = GPUS[known]
    elif name[:1].isdigit():
        gpu = Gpu(as_bytes("--gpu", name, least=1), DEFAULT_TFLOPS * 1e12, parse_bytes(DEFAULT_BUS))
    else:
        raise unknown("GPU", name, GPUS, "or give the size of its memory, --gpu 80GiB, and --tflops")
    if tflops is not None:
        if not tflops > 0:
            raise ConfigError(f"--tflops {tflops:g}: must be more than 0, for example 989 for an H100")
        gpu = gpu._replace(flops=tflops * 1e12)
    return gpu if bus is None else gpu._replace(bus_bytes_per_s=as_bytes("--bus", bus, least=1))


def check_mfu(mfu: float) -> None:
    """Raises ConfigError for an invalid share of a GPU's arithmetic."""
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu:g}: must be above 0, at most 1; 0.5 is common for prefill")


def as_rate(flag: str, text: str) -> int:
    """Bytes per second, written as bytes or, as networks are sold, as bits. Raises ConfigError."""
    amount = text.strip().lower().removesuffix("/s")
    for bits, unit in _BITS.items():
        if amount.endswith(bits):
            rate = as_bytes(flag, amount.removesuffix(bits) + unit) // 8
            break
    else:
        rate = as_bytes(flag, text)
    if not rate:
        raise ConfigError(f"{flag} {text}: must be more than 0")
    return rate


def as_seconds(flag: str, text: str) -> float:
    """A duration. Raises ConfigError."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def as_bytes(flag: str, text: str, least: int = 0) -> int:
    """A size, or a rate if `/s` follows. Raises ConfigError, also for a value below `least`."""
    try:
        value = parse_bytes(text.removesuffix("/s"))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if value < least:
        raise ConfigError(f"{flag} {text}: must be more than 0")
    return value
