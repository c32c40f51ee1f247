"""What the tests with several ranks share: a tuned function per rank, and how each of its calls ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_autotune.agreement import AGREEMENTS
from kernels_for_tests import Bench

TIMEOUT_S = 20.0  # of exchanges that are to succeed, on a machine that is busy with other tests
SOON_S = 10.0  # the end of what needs no time-out: far from TIMEOUT_S, far above what a busy machine adds
SHORT_S = 1.5  # of exchanges that are to be given up: `meet` before them, or a slow rank is given up too
IN_TIME_S = 6 * SHORT_S  # their end: less than the tenfold that heartbeats could buy


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


def set_patience(tuned: Any, timeout_s: float) -> None:
    """Let the exchanges of a function that has been called end after `timeout_s`, from the next one on.

    So that only those are short that are to be given up: ranks may start, or come to a run, seconds apart.
    """
    tuned._calls.domain.timeout_s = timeout_s


def listen() -> list[tuple[str, int]]:
    """Return a list that grows by (op, position) whenever the default group's hub has taken in a message.

    To be called on the rank that runs the hub, after an exchange.
    """
    hub, heard = AGREEMENTS.of(None).peers.hub, []
    handle = hub.handle

    def handle_and_note(message: dict[str, Any], reply: Callable[[Any], None]) -> None:
        handle(message, reply)
        heard.append((message["op"], message["position"]))

    hub.handle = handle_and_note
    return heard


def interrupt_when_waiting() -> None:
    """Send this process, which runs the hub, a Ctrl-C once it waits for its peers; returns at once."""
    heard = listen()

    def interrupt() -> None:
        wait_for(lambda: ("collect", 0) in heard)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
