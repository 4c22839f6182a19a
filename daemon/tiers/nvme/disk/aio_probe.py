"""Tries Linux AIO on a directory, before blocks rely on it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from .disk import PAGE_BYTES, DiskIO
from .kernel_aio import AioContext


def refusal_of_aio(disk: DiskIO, path: Path) -> str:
    """Why AIO cannot be used for files there, in words; empty when it can. Blocks as the disk does; raises OSError.

    It is tried with a page of a file at `path`, which is removed. Direct I/O must work there.
    """
    eventfd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        try:
            context = disk.aio(1, eventfd, 1)
        except OSError as error:
            return in_words(error)
        try:
            reason = _tried(disk, context, eventfd, path)
        finally:
            refused = _closed(context)
        return reason or refused
    finally:
        os.close(eventfd)


def _closed(context: AioContext) -> str:
    """Give the context back; why the kernel does not take it, in words."""
    try:
        context.close()
    except OSError as error:
        return f"this kernel refuses io_destroy: {error.strerror}"
    return ""


def _tried(disk: DiskIO, context: AioContext, eventfd: int, path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # left by a daemon that was killed
        disk.unlink(path)
    memory = mmap.mmap(-1, 2 * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
    try:
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return ""  # as for direct I/O
        raise
    try:
        for writes, place in ((True, address), (False, address + PAGE_BYTES)):
            context.ready(0, writes, fd, [(place, PAGE_BYTES)], 0)
            try:
                context.submit([0])
            except OSError as error:
                return f"this kernel refuses io_submit: {error.strerror}"
            try:
                found = context.results()
                while not found:
                    os.eventfd_read(eventfd)
                    found = context.results()
            except OSError as error:
                os.eventfd_read(eventfd)  # until the transfer has ended: it uses this memory
                context.flying = 0
                return f"this kernel refuses io_getevents: {error.strerror}"
            [(_, result)] = found
            if result == -errno.ENOSPC:
                return ""  # a full disk still has blocks to read
            if result != PAGE_BYTES:
                what = os.strerror(-result) if result < 0 else f"{result} bytes of a page"
                return f"AIO fails on this file system: {what}"
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):  # the result is known by now
            disk.unlink(path)
    return "" if memory[:PAGE_BYTES] == memory[PAGE_BYTES:] else "a page written by AIO was not read back"


def in_words(error: OSError) -> str:
    """Why there is no context."""
    if error.errno == errno.EAGAIN:
        return "io_setup: other processes use all of fs.aio-max-nr (see /proc/sys/fs/aio-nr)"
    if error.errno == errno.EOPNOTSUPP:
        return str(error.strerror)
    return f"this kernel refuses io_setup: {error.strerror}"
