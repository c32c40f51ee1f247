"""What the ranks wrote down of one session, by rank and by run."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Merged, Record, Resumed, RunFailed, RunStarted, SessionClosed, SessionOpened, Trial

CLOSED_WELL = ("settled", "partial")


class LoggedSession:
    """The records of one session, from all logs that are there."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name = name
        self.by_rank: dict[int, list[Record]] = {}
        self.said: dict[int, list[Merged]] = {}  # run -> what all ranks said, as each of them wrote it down
        for record in records:
            self.by_rank.setdefault(record.rank, []).append(record)
            if isinstance(record, Merged):
                self.said.setdefault(record.run, []).append(record)
        self.opened = next((record for record in records if isinstance(record, SessionOpened)), None)
        by_rank = [record for own in self.by_rank.values() for record in own]
        self.resumed = next((record for record in by_rank if isinstance(record, Resumed)), None)
        self.has_trials = any(isinstance(record, Trial) for record in records)
        self.has_failed = any(isinstance(record, RunFailed) for record in records)

    @property
    def runs(self) -> int:
        """Return how many runs were made, as far as is known."""
        return max(self.said, default=-1) + 1

    @property
    def closed(self) -> list[SessionClosed]:
        return [r for records in self.by_rank.values() for r in records if isinstance(r, SessionClosed)]

    def started(self, rank: int) -> list[RunStarted]:
        return [record for record in self.by_rank[rank] if isinstance(record, RunStarted)]

    def complete(self, run: int) -> dict[int, list[Record]]:
        """Return the records of one run, of the ranks that wrote down all of it: nothing ended it there."""
        return {
            rank: [record for record in records if getattr(record, "run", None) == run]
            for rank, records in self.by_rank.items()
            if self._is_complete(rank, run)
        }

    def _is_complete(self, rank: int, run: int) -> bool:
        return any(
            (isinstance(record, SessionClosed) and record.outcome in CLOSED_WELL)
            or (isinstance(record, RunStarted) and record.run > run)
            for record in self.by_rank[rank]
        )
