"""What the ranks' recorded samples say, counted anew: each rank's statistic, and all of them merged.

By the code of a session: `Stopwatch` keeps the samples of a rank and `Part.merged` puts ranks together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..logs.records import Record, RunTimed, Trial
from ..search.context_search import Outcome
from ..search.messages import Part, Payload
from ..search.rules import BY_LAUNCH
from ..timing.samples import Stopwatch

_WHOLE_RUN = ""


@dataclass(frozen=True)
class Miscount:
    """A recorded time that does not follow from the recorded samples."""

    context: str  # empty: of the whole run
    what: str
    recorded: str
    recomputed: str


class _RecordedClock:
    """Reads what the mark was made with; nothing is timed here."""

    def __init__(self) -> None:
        self.ms = math.nan
        self.own_gap_ms = 0.0

    def gap_ms(self, mark: float) -> float:
        return self.own_gap_ms

    def start(self) -> float:
        return self.ms

    def stop(self, mark: float) -> None:
        pass

    def read_ms(self, mark: float) -> float:
        return mark


class RecordedStopwatch(Stopwatch):
    """A rank's samples of one context, kept by the code that keeps them in a session."""

    def __init__(self, statistic: str) -> None:
        self._recorded = _RecordedClock()
        super().__init__(self._recorded, statistic, flags_gaps=True)

    def measure(
        self, candidate: str, ms: float | None, *, gap_ms: float = 0.0, late_ms: float = 0.0, counts: bool
    ) -> Part:
        """Return what the rank told of a run in which it measured `ms`; keep that if it `counts`."""
        self.begin_run()
        self._recorded.ms, self._recorded.own_gap_ms = math.nan if ms is None else ms, gap_ms
        self.stop(self.start())
        told = self.tell(candidate, waits=True)
        self.take(waiting=False, counts=counts, late_ms=late_ms)
        return told


class Recount:
    """The samples of all ranks so far, over the sessions of one function. No `ranks`: they are not known."""

    def __init__(self, statistic: str, ranks: Sequence[int]) -> None:
        self.total = 0  # agreed times made anew
        self._statistic = statistic
        self._ranks = ranks
        self._watches: dict[tuple[int, str], RecordedStopwatch] = {}

    def forget(self, contexts: set[str]) -> None:
        """Drop the samples of searches that were dropped."""
        self._watches = {where: watch for where, watch in self._watches.items() if where[1] not in contexts}

    def run(
        self,
        records: Mapping[int, Sequence[Record]],
        merged: Payload,
        outcomes: Mapping[str, Outcome],
        waiting: set[str],
        *,
        counts: bool,
    ) -> Iterator[Miscount]:
        """Take in one run; yield what was recorded otherwise. `waiting`: contexts whose sample was late."""
        if not self._ranks:
            return
        for name, outcome in outcomes.items():
            if outcome.kind == "incumbent" or outcome.judge != BY_LAUNCH:
                continue
            parts: dict[int, Part] = {}
            for rank in self._ranks:
                trial = next((t for t in records.get(rank, ()) if _is_trial(t, name)), None)
                watch = self._watch(rank, name)
                if isinstance(trial, Trial):
                    part = watch.measure(
                        str(outcome.index),
                        trial.ms,
                        gap_ms=trial.gap_ms,
                        late_ms=merged.late_ms,
                        counts=outcome.kind == "sample",
                    )
                    parts[rank] = part
                    yield from _compare_statistic(name, trial, part)
                elif name not in waiting and (retold := watch.retell(str(outcome.index))) is not None:
                    parts[rank] = retold
            yield from self._compare(name, records, merged.parts[name], parts)
        yield from self._whole_run(records, merged, counts=counts)

    def _whole_run(
        self, records: Mapping[int, Sequence[Record]], merged: Payload, *, counts: bool
    ) -> Iterator[Miscount]:
        parts: dict[int, Part] = {}
        for rank, own in records.items():
            timed = next((record for record in own if isinstance(record, RunTimed)), None)
            if timed is None:
                continue
            if timed.counts != counts:
                what = f"run_timed of rank {rank}: counts"
                yield Miscount(_WHOLE_RUN, what, str(timed.counts), str(counts))
            parts[rank] = self._watch(rank, timed.session).measure(
                timed.judged, timed.ms, late_ms=merged.late_ms, counts=counts
            )
            yield from _compare_statistic(_WHOLE_RUN, timed, parts[rank])
        if parts:
            yield from self._compare(_WHOLE_RUN, records, merged.run, parts)

    def _compare(
        self, name: str, records: Mapping[int, Sequence[Record]], recorded: Part, parts: Mapping[int, Part]
    ) -> Iterator[Miscount]:
        """Compare what all ranks said with what their samples say, if every rank's samples are here."""
        if any(rank not in records for rank in self._ranks):
            return
        self.total += 1
        recounted = functools.reduce(Part.merged, parts.values(), Part())
        for field in ("measured", "unmeasured", "worst_ms", "best_ms", "total_fs"):
            values = getattr(recorded, field), getattr(recounted, field)
            if field == "unmeasured" and values[0] < values[1]:
                continue  # nor does a rank's record say why it has no time: unusable, or not taken
            if values[0] != values[1]:
                yield Miscount(name, f"agreed over the ranks: {field}", str(values[0]), str(values[1]))

    def _watch(self, rank: int, name: str) -> RecordedStopwatch:
        if (rank, name) not in self._watches:
            self._watches[rank, name] = RecordedStopwatch(self._statistic)
        return self._watches[rank, name]


def _is_trial(record: Record, name: str) -> bool:
    return isinstance(record, Trial) and record.context == name


def _compare_statistic(name: str, record: Trial | RunTimed, part: Part) -> Iterator[Miscount]:
    recomputed = part.worst_ms if part.measured else None
    if record.statistic_ms != recomputed:
        what = f"{record.event} of rank {record.rank}: statistic_ms"
        yield Miscount(name, what, str(record.statistic_ms), str(recomputed))
