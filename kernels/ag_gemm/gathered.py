"""Which rows the last call of `AllGatherGemm` has gathered, and where in its buffer they lie.

The host does not see replays of graphs. So captured calls have the device note their rows, and so have pushed
ones; once there is such a call, each other one notes that its rows are not among these.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..exchange.push import ChunkPusher
from .gather_buffer import GatherBuffer

FETCHED, PUSHED, COLLECTIVE = "fetched", "pushed", "by the collective"
NOTHING = nullcontext()


class GatheredRows:
    """The rows of the last call, and of the last call or replay."""

    def __init__(self, buffer: GatherBuffer, pusher: ChunkPusher) -> None:
        self._buffer, self._pusher = buffer, pusher
        self._way, self._rows = "", 0  # of each rank, in the last call that the host made
        self._eager: tuple[str, int] | None = None  # the same of the last one that noted no rows
        # That the device has last been told of, 0 while there are none; below 0: by the collective.
        self._noted = self._noted_before = 0

    def begin(self) -> None:
        """Begin a call, which `undo` takes back."""
        self._noted_before = self._noted

    def undo(self) -> None:
        """Take back the call that has begun: no call of a failed capture has happened."""
        self._noted = self._noted_before

    def fetch(self, rows: int) -> AbstractContextManager[None]:
        """Count a call that fetches so many rows; return the context in which it does."""
        self._way, self._rows = self._eager = FETCHED, rows
        return self._pusher.noting(0) if self._noted else NOTHING

    def push(self, rows: int) -> None:
        """Count a call that pushes so many rows, which the pusher notes."""
        self._way, self._rows = PUSHED, rows
        self._noted = rows

    def by_collective(self, rows: int, *, is_capturing: bool) -> AbstractContextManager[None]:
        """Count a call that gathers so many rows by the collective; return the context in which it does."""
        self._way, self._rows = COLLECTIVE, rows
        if is_capturing:
            self._noted = -rows
            return self._pusher.noting(-rows)
        self._eager = COLLECTIVE, rows
        return self._pusher.noting(0) if self._noted else NOTHING

    def of_call(self) -> torch.Tensor:
        """Return the rows of the last call that the host made, as they lie in memory."""
        return self._find(self._way, self._rows)

    def of_replay(self, *, is_capturing: bool) -> torch.Tensor:
        """Return the rows of the last call or replay; wait for the device where that is to tell."""
        if self._noted:
            rows = self._noted if is_capturing else self._pusher.last_rows()
            if rows:
                return self._find(PUSHED if rows > 0 else COLLECTIVE, abs(rows))
        if self._eager is None:
            raise RuntimeError("nothing has been gathered yet; call the operation first")
        return self._find(*self._eager)

    def _find(self, way: str, rows: int) -> torch.Tensor:
        if way == COLLECTIVE:
            return self._buffer.room(rows)[0]
        return self._pusher.gathered(rows) if way == PUSHED else self._buffer.fetched(rows)
