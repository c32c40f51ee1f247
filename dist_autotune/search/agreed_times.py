"""The agreed times of a context's candidates."""

from __future__ import annotations

import math
from collections.abc import Container

from .reports import AgreedPart
from .strategies import interval

HOST_SHARE = 0.03  # of an agreed time: a larger part of the host's counts


class AgreedTimes:
    """Agreed milliseconds so far, by candidate."""

    def __init__(self) -> None:
        self.ms: dict[int, float] = {}
        self.warmup_ms: dict[int, float] = {}  # of a warm-up run: no sample, but something known
        self.fastest_ms: dict[int, float] = {}  # the fastest rank's
        self.gap_ms: dict[int, float] = {}  # how much of the agreed ms may be a host's

    def record_sample(self, index: int, judged: AgreedPart) -> float:
        """Return the agreed time so far; nan unless each rank that launched the candidate has a sample."""
        ms = judged.ms
        if ms is None:
            self.ms.pop(index, None)
        else:
            self.ms[index], self.fastest_ms[index] = ms, judged.best_ms
            self.gap_ms[index] = judged.gap_ms
        return self._so_far(index)

    def record_warmup(self, index: int, judged: AgreedPart) -> float:
        """Return the agreed time so far; without samples that of the warm-up."""
        ms = judged.ms
        if ms is not None:
            self.warmup_ms[index] = interval(ms, judged.gap_ms)
        return self._so_far(index) if ms is None or index in self.ms else self.warmup_ms[index]

    def agreed_ms(self, index: int) -> float:
        """Return a candidate's time so far, of its warm-up where it has no sample; 0.0: it has neither."""
        return self._so_far(index) if index in self.ms else self.warmup_ms.get(index, 0.0)

    def _so_far(self, index: int) -> float:
        return interval(self.ms.get(index, math.nan), self.host_ms(index))

    def drop_samples(self) -> None:
        self.ms, self.warmup_ms, self.fastest_ms, self.gap_ms = {}, {}, {}, {}

    def fastest(self, banned: Container[int]) -> int | None:
        """Return the fastest candidate, the first of equal ones; None: none has one. Any thread may ask."""
        usable = [(ms, index) for index, ms in tuple(self.ms.items()) if index not in banned]
        return min(usable)[1] if usable else None

    def known(self, banned: Container[int]) -> list[tuple[int, float]]:
        """Return (index, ms) of each candidate that ran: of its warm-up where it has no sample."""
        known = {**self.warmup_ms, **self.ms}
        return sorted((index, float(ms)) for index, ms in known.items() if index not in banned)

    def ratio(self, index: int, other: int) -> float:
        """Return the agreed time of one candidate over another's; 1.0 where one has none."""
        return self.ms[index] / self.ms[other] if {index, other} <= self.ms.keys() else 1.0

    def host_ms(self, index: int) -> float:
        """Return how much of a candidate's agreed time may be a host's; 0.0: too little to count."""
        gap_ms = self.gap_ms.get(index, 0.0)
        return gap_ms if gap_ms > HOST_SHARE * self.ms.get(index, math.inf) else 0.0

    def is_launch_bound(self, index: int, banned: Container[int]) -> bool:
        """Return whether a host's part may be in a candidate's time, or in the fastest."""
        judges = (index, self.fastest(banned))
        return any(self.host_ms(each) > 0 for each in judges if each is not None)

    def are_equal(self, *indices: int) -> bool:
        """Return whether two candidates are equal, if the slower time alone held all of the host's."""
        (less, _), (more, slower) = sorted((self.ms.get(index, math.inf), index) for index in indices)
        return more - self.host_ms(slower) <= less
