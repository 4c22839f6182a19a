"""What is here: driver, torch, Triton, limits, disk; and whether the smallest use of each works."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu.place import GIB, REHEARSAL
from gpu.tell import Skip, check, checking, fact, skip

PACKAGES = (
    "torch triton transformers numpy pyzmq msgspec msgpack xxhash lz4 typer pytest pytest-xdist pytest-timeout "
    "hypothesis kvikio-cu13 libkvikio-cu13 cupy-cuda13x nvidia-cufile vllm"
)
ATTRIBUTES = {
    "unified addressing": 41,
    "host registration": 99,
    "host pointers of registered memory": 91,
    "pageable memory access": 88,
    "copy engines": 40,
    "multiprocessors": 16,
    "GPUDirect RDMA": 116,
}
"""Numbers of CUdevice_attribute."""
QUERY = (
    "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "clocks.sm,clocks.mem,mig.mode.current"
)


def run(_: Sequence[str]) -> None:
    """Tell all of it."""
    machine()
    disk()
    card()
    smallest_uses()


def machine() -> None:
    fact("python", sys.version.split()[0])
    fact("kernel", platform.release())
    fact("cores", os.cpu_count())
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    for name in ("MemTotal", "MemAvailable", "HugePages_Total"):
        fact(name, memory.get(name, "").strip())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fact("memlock", ["unlimited" if part == resource.RLIM_INFINITY else part for part in limit])
    fact("root", os.geteuid() == 0)
    for tool in ("gcc", "cc", "nvcc", "git"):
        fact(tool, shutil.which(tool) or "none")
    versions = {}
    for name in PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    fact("packages", versions)
    for name in ("shared memory", "/dev/shm"), ("thp for shmem", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"):
        path = Path(name[1])
        if path.is_dir():
            fact(name[0], f"{shutil.disk_usage(path).free / GIB:.1f} GiB free")
        elif path.exists():
            fact(name[0], path.read_text().strip())


def disk() -> None:
    folder = Path(tempfile.gettempdir())
    fact("disk", f"{shutil.disk_usage(folder).free / GIB:.1f} GiB free in {folder}")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    real = str(folder.resolve())
    own = max((one for one in mounts if real.startswith(one[1])), key=lambda one: len(one[1]), default=["?", "?", "?"])
    fact("file system", f"{own[2]} on {own[0]}")
    with checking("O_DIRECT works there"), tempfile.NamedTemporaryFile() as file:
        os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    for name, path in (
        ("nvidia-fs", "/proc/driver/nvidia-fs/stats"),
        ("udev", "/run/udev"),
        ("modules", "/proc/modules"),
    ):
        fact(name, "there" if Path(path).exists() else "none")


def card() -> None:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        fact("nvidia-smi", (asked.stdout or asked.stderr).strip()[:300])
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if REHEARSAL:
            skip("driver", str(error))
        else:
            check("the driver's library loads", False, str(error))
        return
    value = ctypes.c_int()
    library.cuInit(0)
    library.cuDriverGetVersion(ctypes.byref(value))
    fact("driver's CUDA", value.value)
    for name, number in ATTRIBUTES.items():
        code = library.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        fact(name, value.value if code == 0 else f"error {code}")
    from tiercache.copies.cuda_driver import driver

    found = driver()
    check("the driver has all calls that copies need", found is not None)
    fact("batched copies", found is not None and found.batches)


def smallest_uses() -> None:
    with checking("torch reaches the device"):
        import torch

        fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
        if REHEARSAL:
            raise Skip("a rehearsal has no device")
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(torch.device("cuda"))
        fact("card", f"{properties.name}, capability {properties.major}.{properties.minor}")
        fact("device memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")
        assert float(torch.ones(8, device="cuda").sum()) == 8.0
    with checking("a kernel of Triton compiles and runs"):
        if REHEARSAL:
            raise Skip("a rehearsal has no device")
        import torch

        from tiercache.kernels.block_copy import PoolTable, gather_blocks

        pool = torch.arange(4096, dtype=torch.int32, device="cuda").view(4, 1024)
        out = torch.zeros(2, 4096, dtype=torch.uint8, device="cuda")
        gather_blocks(PoolTable.from_layers([pool]), [3, 1], out)
        assert torch.equal(out.view(torch.int32), pool[[3, 1]])
    with checking("a daemon starts and answers"):
        import tiercache
        from tiercache.client.client import Client

        with tiercache.launch("64MiB") as daemon, Client.connect(daemon.address) as client:
            fact("arena", client.stats()["arena"])
    with checking("kvikio imports"):
        if importlib.util.find_spec("kvikio") is None:
            raise Skip("kvikio is not installed")
        if REHEARSAL:
            raise Skip("a rehearsal has no cuFile")
        # In a process of its own: where GPUDirect does not work it can hang.
        code = "import kvikio, kvikio.defaults; print(kvikio.__version__)"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
        assert asked.returncode == 0, asked.stderr[-600:]
