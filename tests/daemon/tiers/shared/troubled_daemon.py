"""The daemon on a host with a trouble of the kernel's, in namespaces of its own: `unshare -rnm python FILE TROUBLE`.

names          name servers never answer
folder PATH    a file system that answers nothing is mounted at PATH: who looks there cannot even be killed
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import tempfile

_MS_BIND = 4096
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_SET_PDEATHSIG = 1
_FUSE_MAJOR, _FUSE_MINOR = 7, 31
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind or 'bind'} at {target}")


def lose_names() -> None:
    """A name server that takes questions."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    os.set_inheritable(server.detach(), True)
    file, path = tempfile.mkstemp()
    os.write(file, b"nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    _mount(path, "/etc/resolv.conf", "", _MS_BIND, "")
    os.unlink(path)


def hang_folder(place: str) -> None:
    """A process that takes requests of the file system, and answers the first one only: then it counts as mounted."""
    device = os.open("/dev/fuse", os.O_RDWR)
    _mount("hanging", place, "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
    if os.fork():
        os.close(device)
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = os.read(device, 1 << 17)
    unique = struct.unpack_from("<Q", request, 8)[0]
    told = struct.pack("<IIIIHHI", _FUSE_MAJOR, _FUSE_MINOR, 0, 0, 12, 9, 1 << 16).ljust(64, b"\0")
    os.write(device, struct.pack("<IiQ", 16 + len(told), 0, unique) + told)
    while True:
        os.read(device, 1 << 17)


def main() -> None:
    trouble, *arguments = sys.argv[1:]
    if trouble == "names":
        lose_names()
    else:
        hang_folder(arguments.pop(0))
    os.execv(sys.executable, [sys.executable, os.path.join(os.path.dirname(__file__), "brief_daemon.py"), *arguments])


if __name__ == "__main__":
    main()
