"""Errors on the files of a directory, in words: which file, why, and what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tiercache.errors import DirectoryUnavailable
from tiercache.ground.file_systems import lacks_inodes

_STRANGE = "something else stands where a file of tiercache should be: move it away"
_SECCOMP = "in a container the seccomp profile may refuse a call on files (strace names it): allow it"
_REMEDIES = {
    errno.EACCES: "let user {uid} read and write there (chown)",
    errno.EPERM: "see whether it is immutable (lsattr), let user {uid} write there; " + _SECCOMP,
    errno.ENOSYS: _SECCOMP,
    errno.EROFS: "its file system is mounted read-only: see dmesg, repair it, mount it again",
    errno.EIO: "see dmesg and the health of the disk",
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room, or raise the disk quota of user {uid}",
    errno.ENOENT: "mount its disk, or make the directory again",
    errno.ENOTCONN: "mount its file system again",
    errno.ESTALE: "mount its file system again",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE)",
    errno.ENFILE: "raise the limit of open files (fs.file-max)",
    errno.ENOLCK: "use a file system with locks, and allow flock in the seccomp profile of a container",
    errno.EISDIR: _STRANGE,
    errno.ENOTDIR: _STRANGE,
    errno.EEXIST: _STRANGE,
    errno.ELOOP: "a symbolic link stands where a file of tiercache should be: move it away",
    errno.ENXIO: _STRANGE,
}
_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


def unavailable(directory: Path, error: OSError) -> DirectoryUnavailable:
    """Why a directory cannot be used now, as one line."""
    file = directory if error.filename is None else Path(_BY_DESCRIPTOR.sub(str(directory), str(error.filename)))
    whose = "" if file == directory else f"{file.name}: "
    remedy = _REMEDIES.get(error.errno or 0, "see that user {uid} can use it").format(uid=os.geteuid())
    if error.errno == errno.ENOSPC and lacks_inodes(directory):
        remedy = "there is room, but its file system has no inodes left (df -i): remove files there"
    what = error.strerror or str(error)
    return DirectoryUnavailable(f"nvme directory {directory} cannot be used: {whose}{what}: {remedy}")
