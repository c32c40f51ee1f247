"""The failures that kernels record about ranks, and what a host says of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..signals import Failure, read_failure
from ..symm import SymmetricMemory


class Refusal(NamedTuple):
    """How kernels see a rank that refuses a call."""

    kind: int  # of the failure that its peers' kernels record
    seen: int  # the value in that record
    mark: int  # what the rank sends in place of its rows or choices


class FailureKinds(NamedTuple):
    """The kinds of failure that the kernels of an operation record."""

    # What a record about `peer` means, by kind; `seen` is its value, `peers` are the peers of this `rank`.
    texts: dict[int, str]
    of_callers: tuple[int, ...]  # kinds caused by wrong calls
    late: str = ""  # the text of all other kinds
    advice: str = "Every rank must pass as many rows. "  # after a wrong call
    refusal: Refusal = Refusal(-1, 0, 0)  # -1: no kind


class FailureRecords:
    """The first failure that kernels have recorded about each rank, see `signals`."""

    def __init__(self, memory: SymmetricMemory) -> None:
        # Pinned, not on the device: the host looks for failures without waiting for the GPU.
        is_on_gpu = memory.device.type == "cuda"
        words = torch.zeros(memory.world_size, dtype=torch.int64, device="cpu", pin_memory=is_on_gpu)
        self.words = memory.hold(words)  # int64 [W], which kernels write
        self._read = self.words.numpy()
        self._none = self._read.tobytes()

    def are_none(self) -> bool:
        """Return whether no kernel has recorded a failure; asked in every call: `any()` takes longer."""
        return bool(self._read.tobytes() == self._none)

    def by_rank(self) -> dict[int, Failure]:
        """Return the failures that have been recorded."""
        return {rank: found for rank, word in enumerate(self._read) if (found := read_failure(int(word)))}

    def forget(self, rank: int) -> None:
        """Let kernels record another failure about the rank."""
        self._read[rank] = 0
