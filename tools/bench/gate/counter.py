"""Counts what a process executes, by the counters of Linux's perf_event_open.

What a kernel executes does not depend on other processes or on modes of memory, so that a change
shows where times are too noisy; workers that wait add to it. Many virtual machines have no such
counters.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

#: linux/perf_event.h, each a type and a config of struct perf_event_attr.
INSTRUCTIONS = (0, 1)  # PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS
TASK_CLOCK = (1, 1)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK, in nanoseconds

SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6


class Counter:
    """A count of this thread and of all threads that it starts afterwards, outside the kernel."""

    def __init__(self, event: tuple[int, int] = INSTRUCTIONS) -> None:
        """Begin to count. OSError says that this machine, or who runs it, does not allow that."""
        call = SYSTEM_CALLS.get(platform.machine())
        if call is None:
            raise OSError(f"the number of perf_event_open is not known for {platform.machine()}")
        kind, config = event
        flags = INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
        # The first version of the struct: type, size, config, period, sample_type, read_format,
        # flags, wakeup_events, bp_type, bp_addr.
        attributes = struct.pack("=IIQQQQQIIQ", kind, 64, config, 0, 0, 0, flags, 0, 0, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(
            ctypes.c_long(call), attributes, *map(ctypes.c_long, (0, -1, -1, 0))
        )
        if self._file < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def read(self) -> int:
        """Return the count so far."""
        [count] = struct.unpack("=Q", os.read(self._file, 8))
        return int(count)

    def close(self) -> None:
        os.close(self._file)


def instructions() -> Counter | None:
    """Return a counter of instructions, or None where there is none."""
    try:
        return Counter()
    except OSError:
        return None
