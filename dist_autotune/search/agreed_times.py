"""The times that the ranks have agreed on, of one context's candidates. No torch, no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Container

from .messages import FS_PER_MS, Part
from .strategies import AgreedMs

HOST_SHARE = 0.03  # of an agreed time; what the host may have added to it counts when it is more


class AgreedTimes:
    """Agreed milliseconds so far, by the candidate's index. rank_reduce: the option."""

    def __init__(self, rank_reduce: str) -> None:
        self.ms: dict[int, float] = {}
        self.warmup_ms: dict[int, float] = {}  # of a warm-up run: no sample, but something known
        self.fastest_ms: dict[int, float] = {}  # the fastest rank's
        self.gap_ms: dict[int, float] = {}  # how much of the agreed ms may be a host's
        self._rank_reduce = rank_reduce

    def take_sample(self, index: int, judged: Part) -> None:
        """Take in what the ranks say of a candidate: no time, unless each rank that ran it has one."""
        ms = self.reduced_ms(judged)
        if ms is None:
            self.ms.pop(index, None)
        else:
            self.ms[index], self.fastest_ms[index] = ms, judged.best_ms
            self.gap_ms[index] = judged.gap_ms

    def take_warmup(self, index: int, judged: Part) -> float:
        """Take in what the ranks say of a warm-up, and return its agreed time; nan: it has none."""
        ms = self.reduced_ms(judged)
        if ms is None:
            return math.nan
        self.warmup_ms[index] = ms
        return AgreedMs(ms, ms - judged.gap_ms) if judged.gap_ms > 0 else ms

    def told(self, index: int) -> float:
        """Return the agreed time so far as a flow is told it: an interval where a host may be in it."""
        ms, host_ms = self.ms.get(index, math.nan), self.host_ms(index)
        return AgreedMs(ms, ms - host_ms) if host_ms > 0 else ms

    def forget_samples(self) -> None:
        """Begin anew: candidates are judged by something else now."""
        self.ms, self.fastest_ms, self.gap_ms = {}, {}, {}

    def reduced_ms(self, judged: Part) -> float | None:
        """Return the agreed time; None when a rank that launched the candidate has no sample."""
        if judged.unmeasured or not judged.measured:
            return None
        if self._rank_reduce == "max":
            return judged.worst_ms
        return judged.total_fs / (judged.measured * FS_PER_MS)

    def fastest(self, banned: Container[int]) -> int | None:
        """Return the fastest candidate, the first of equal ones; None: none has one. Any thread may ask."""
        usable = [(ms, index) for index, ms in tuple(self.ms.items()) if index not in banned]
        return min(usable)[1] if usable else None

    def host_ms(self, index: int) -> float:
        """Return how much of a candidate's agreed time may be a host's; 0.0: too little to count.

        The kernel's own time lies between the agreed time less this and the agreed time.
        """
        gap_ms = self.gap_ms.get(index, 0.0)
        return gap_ms if gap_ms > HOST_SHARE * self.ms.get(index, math.inf) else 0.0

    def are_equal(self, *indices: int) -> bool:
        """Return whether two candidates are equal by what the clocks can tell.

        Where the device waited for a host, the slower of two times may hold all of that wait and the faster
        none of it: their order is known only if it stands even then.
        """
        (less, _), (more, slower) = sorted((self.ms.get(index, math.inf), index) for index in indices)
        return more - self.host_ms(slower) <= less
