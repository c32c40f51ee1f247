"""What the tests with several ranks share: a tuned function per rank, and how each of its calls ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels_for_tests import Bench

TIMEOUT_S = 20.0  # of exchanges that are to succeed, on a machine that is busy with other tests
SHORT_S = 0.6  # of those that are to be given up


def tune(bench: Bench, thunk: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate for several ranks: nothing on disk, one sample of each config unless `options` differ."""
    return bench.tune(thunk, **{"is_dist": True, "cache": False, "timeout_s": TIMEOUT_S, **options})


def ending(call: Callable[[], Any]) -> str:
    """Return how `call` ended, as "Type: message" or "returned value"."""
    try:
        return f"returned {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def blocks_of(tuned: Any) -> dict[str, int | None]:
    """Return the BLOCK of each context's winner, by kernel and key."""
    return {
        f"{context.kernel}{context.key[0]}": context.config.kwargs["BLOCK"] if context.config else None
        for context in tuned.report.contexts
    }


def statuses_of(tuned: Any) -> dict[str, str]:
    return {f"{context.kernel}{context.key[0]}": context.status for context in tuned.report.contexts}


def wait_for(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
