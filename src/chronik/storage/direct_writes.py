"""Durable writes of whole pages without a thread: Linux's asynchronous I/O, past the page cache.

A write and a sync in a thread wake that thread, hand the interpreter over twice, and wake the loop. Here the loop
starts the write, and its end wakes the loop. Files are opened with O_DIRECT and O_DSYNC: a write that succeeded is
durable.

Only for blocks that were written before: the kernel may wait in `submit` for others.
"""

import ctypes
import mmap
import os
import platform
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable
from errno import EINTR
from struct import Struct
from typing import Final, NamedTuple

_IOCB: Final = Struct("<QIIHhIQQqQII")
"""data, key, flags, opcode, priority, descriptor, address, size, position, reserved, flags, eventfd"""
_EVENT: Final = Struct("<QQqq")
"""data, iocb, result, result 2"""
_PWRITE: Final = 1
_HAS_EVENTFD: Final = 1


class _Calls(NamedTuple):
    """Numbers of the system calls, which the C library does not wrap."""

    io_setup: int
    io_destroy: int
    io_getevents: int
    io_submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}


class DirectWriter:
    """Writes from `buffer`, one write at a time. Its owner serializes all calls.

    `event_fd` is readable when a write has ended. The buffer must not change before.
    """

    def __init__(self, buffer_bytes: int) -> None:
        """Raises OSError if this machine has no asynchronous I/O."""
        calls = _CALLS.get(platform.machine())
        if calls is None or not sys.platform.startswith("linux"):
            raise OSError("no asynchronous I/O on this platform")
        self._calls = calls
        # Keeps the interpreter's lock, which a call that only starts or collects a write need not release.
        self._call = ctypes.PyDLL(None, use_errno=True).syscall
        self._waiting_call = ctypes.CDLL(None, use_errno=True).syscall
        for call in (self._call, self._waiting_call):
            call.argtypes, call.restype = (ctypes.c_long,) * 6, ctypes.c_long
        self._pages = mmap.mmap(-1, buffer_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.buffer = memoryview(self._pages)
        self._iocb = ctypes.create_string_buffer(_IOCB.size)
        self._iocbs = ctypes.c_void_p(ctypes.addressof(self._iocb))
        self._event = ctypes.create_string_buffer(_EVENT.size)
        context = ctypes.c_ulong(0)
        if self._call(calls.io_setup, 1, ctypes.addressof(context), 0, 0, 0) < 0:
            raise _last_error()
        self._context = context.value
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @staticmethod
    def open_file(path: str) -> int:
        """Return a descriptor for `submit`. Raises OSError if the file system cannot bypass its cache."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT | os.O_DSYNC)

    @staticmethod
    def close_file(fd: int) -> None:
        os.close(fd)

    def submit(self, fd: int, size: int, at: int) -> None:
        """Begin to write the first `size` bytes of the buffer at `at`, both whole pages.

        After an OSError nothing was or will be written.
        """
        _IOCB.pack_into(self._iocb, 0, 1, 0, 0, _PWRITE, 0, fd, self._address, size, at, 0, _HAS_EVENTFD, self.event_fd)
        if self._call(self._calls.io_submit, self._context, 1, ctypes.addressof(self._iocbs), 0, 0) != 1:
            raise _last_error()

    def result(self, *, wait: bool) -> int | None:
        """Return the bytes that were written, or a negative errno; None if the write has not ended. Once for each."""
        call, least = (self._waiting_call, 1) if wait else (self._call, 0)
        while True:
            count = call(self._calls.io_getevents, self._context, least, 1, ctypes.addressof(self._event), 0)
            if count == 1:
                return int(_EVENT.unpack(self._event)[2])
            if count == 0:
                return None
            if ctypes.get_errno() != EINTR:
                raise _last_error()

    def watch(self, loop: AbstractEventLoop, on_ended: Callable[[], None]) -> None:
        """Call `on_ended` when a write has ended."""

        def ended() -> None:
            os.eventfd_read(self.event_fd)
            on_ended()

        loop.add_reader(self.event_fd, ended)

    def unwatch(self, loop: AbstractEventLoop) -> None:
        if self.event_fd >= 0:
            loop.remove_reader(self.event_fd)

    def close(self) -> None:
        """Release everything. No write may be in progress."""
        if self.event_fd >= 0:
            self._call(self._calls.io_destroy, self._context, 0, 0, 0, 0)
            os.close(self.event_fd)
            self.event_fd = -1


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
