"""Announces the rows of each call of tensor parallelism to the peers' hosts, in shared memory.

A rank whose workspace is large enough waits for nobody. One that must open a larger one, which is collective,
first compares the rows of all ranks: if they differ it would wait in a collective for a rank that is in a
kernel, and with NCCL meet that rank's next collective.
"""

from __future__ import annotations

import zlib

import torch.distributed as dist

from ..agreement.ballots import Ballots

MOST_ROWS = 2**24 - 1  # that a ballot can tell apart


def word_of(call: str) -> int:
    """Return the upper bits of a ballot, which identify the call; the lower ones are its rows."""
    return zlib.crc32(call.encode()) % 2**7 << 24 | 2**31


class Announcements:
    """Those of one process group; opening is collective.

    Raises SymmetricMemoryError on all ranks where one cannot map a peer's words.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group = group  # a new one may have the same name
        self._rank, self._call = group.rank(), ""
        self._ballots = Ballots("tensor parallelism", group, timeout_s)

    def announce(self, call: str, word: int, rows: int) -> None:
        """Say what this rank is about to call, and with how many rows; word: of the call, see `word_of`."""
        self._call = call
        self._ballots.cast(word | min(rows, MOST_ROWS))

    def require_equal(self) -> None:
        """Wait for what the peers say of the same call; raise ValueError if one says something else."""
        text = self._difference(self._ballots.read())
        if text:
            raise ValueError(text)

    def explain(self) -> str:
        """Return how the peers' last announcements differ from this rank's; "" if they do not, or not yet."""
        return self._difference(self._ballots.read_said())

    def _difference(self, said: dict[int, int]) -> str:
        own = said[self._rank]
        if all(each == own for each in said.values()):
            return ""
        if any(each >> 24 != own >> 24 for each in said.values()):
            others = [rank for rank, each in said.items() if each >> 24 != own >> 24]
            return f"rank {self._rank} calls {self._call}, ranks {others} something else at this point"
        rows = ", ".join(f"rank {rank}: {each & MOST_ROWS}" for rank, each in sorted(said.items()))
        return f"{self._call}: every rank must pass as many rows; {rows}"
