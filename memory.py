"""Main memory: how much there is, whether it ran out, and how to keep what was had.

In:  what the system tells, exceptions.
Out: bytes, yes or no. Apart from device.py because tools and programs ask it without a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt's names for them, malloc.h


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory to be had without swapping, within the limit of a container; None where it is not said."""
    try:
        told = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    rooms = [int(told[1]) * 1024] if told else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such version of control groups, or `max`: no limit
            group = root / "sys/fs/cgroup"
            cache = re.search(
                r"^inactive_file (\d+)", (group / limit).with_name("memory.stat").read_text(), re.MULTILINE
            )
            held = int((group / used).read_text()) - int(cache[1] if cache else 0)
            rooms.append(max(0, int((group / limit).read_text()) - held))
    return min(rooms, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    said = str(error).lower()
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "out of memory" in said or "can't allocate memory" in said


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for its next use; returns whether the C library (glibc) can.

    It gives large pieces back at once, and gets them again page by page: 90,000 page faults, a tenth of a step on the
    CPU with GPT-2's vocabulary.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, -1))
