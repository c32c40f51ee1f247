"""Which rows the last call of `AllGatherGemm` has gathered, and where in its buffer they lie.

The host does not see replays of graphs, so captured calls have the device note their rows; eager ones note 0.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..exchange.push import ChunkPusher
from .gather_buffer import GatherBuffer

NOTHING = nullcontext()


class GatheredRows:
    """The rows of each rank in the last call, and in the last call or replay; below 0: by the collective."""

    def __init__(self, buffer: GatherBuffer, pusher: ChunkPusher) -> None:
        self._buffer, self._pusher = buffer, pusher
        self._of_call = self._of_eager = 0  # the last call that the host made, and the last eager one
        self._are_noted = False  # some call was captured

    def push(self, rows: int, *, is_capturing: bool) -> None:
        """Count a call that pushes so many rows, which the pusher notes."""
        self._of_call = rows
        if is_capturing:
            self._are_noted = True
        else:
            self._of_eager = rows

    def by_collective(self, rows: int, *, is_capturing: bool) -> AbstractContextManager[None]:
        """Count a call that gathers so many rows by the collective; return the context in which it does."""
        self.push(-rows, is_capturing=is_capturing)
        return self._pusher.noting(-rows if is_capturing else 0) if self._are_noted else NOTHING

    def forget(self) -> None:
        """Tell of no rows: the last call has written some, and failed."""
        self._of_call = self._of_eager = 0

    def of_call(self) -> torch.Tensor:
        """Return the rows of the last call that the host made, as they lie in memory."""
        return self._find(self._of_call)

    def of_replay(self, *, is_capturing: bool) -> torch.Tensor:
        """Return the rows of the last call or replay; wait for the device where that is to tell."""
        noted = self._of_call if is_capturing else self._pusher.noted() if self._are_noted else 0
        rows = noted or self._of_eager
        if rows == 0:
            raise RuntimeError("nothing has been gathered yet; call the operation first")
        return self._find(rows)

    def _find(self, rows: int) -> torch.Tensor:
        return self._buffer.chunks(rows) if rows > 0 else self._buffer.room(-rows)[0]
