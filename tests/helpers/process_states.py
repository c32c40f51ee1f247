"""What the kernel tells of processes, and what those tell that are to be killed."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

TELL_S = 2.0  # how long a process may take to say where it stands


def status_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: state ("X": it is gone), parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def has_ended(pid: int) -> bool:
    """Return whether the process is gone, or was not waited for."""
    return status_of(pid)[0] in "XZ"


def let_them_tell(stderr: dict[int, Path]) -> None:
    """Let processes, by pid, write to their stderr where they stand, as far as they can (SIGUSR1)."""
    sizes = {pid: path.stat().st_size for pid, path in stderr.items()}
    for pid in stderr:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + TELL_S
    silent = {pid for pid in stderr if status_of(pid)[0] not in "XZTt"}
    while silent and time.monotonic() < until:
        time.sleep(0.05)  # a text that has not grown for so long has its end
        for pid in list(silent):
            before, sizes[pid] = sizes[pid], stderr[pid].stat().st_size
            if sizes[pid] == before and "most recent call first" in stderr[pid].read_text():
                silent.remove(pid)
    for pid in silent:
        with stderr[pid].open("a") as file:
            file.write(f"it does not say where it stands; {_seen_from_outside(pid)}\n")


def _seen_from_outside(pid: int) -> str:
    """Return how the kernel describes the process: one in "D" waits in a driver, and no signal reaches it."""
    try:
        state = re.search(r"^State:\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\x000")
    except OSError:
        return "it has ended"
    return f"state {state[1] if state else 'unknown'}, in {where or 'user space, or a place not told'}"
