"""Threads that take turns after nearly every instruction, so that what is not safe between them shows."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

SHORT_S = 1e-6


@contextlib.contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SHORT_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


@contextlib.contextmanager
def beside(work: Callable[[], None], is_over: threading.Event) -> Iterator[None]:
    """Let another thread work meanwhile, until it is told that this is over."""
    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()
