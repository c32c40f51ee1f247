"""Memory in huge pages: a fork copies a table with an entry for each page.

That table, and the pages that are copied at their first write, are half of what a rank of a test costs.
"""

import ctypes
import re
from pathlib import Path

MADV_COLLAPSE = 25  # of Linux 6.1; an older kernel refuses it, and all stays as it was
HUGE = 2 << 20
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(?:\[heap\])?$", re.MULTILINE)


def collapse() -> None:
    """Put the memory that this process has of its own into huge pages, as far as the kernel does that."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in ANONYMOUS.findall(Path("/proc/self/maps").read_text()):
        first, last = -(-int(begin, 16) // HUGE), int(end, 16) // HUGE
        if first < last:
            madvise(first * HUGE, (last - first) * HUGE, MADV_COLLAPSE)
