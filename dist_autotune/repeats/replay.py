"""Makes the runs of one call until its session is over, and puts state back between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from ..errors import PutAside
from ..launch.written_tensors import WrittenTensors
from ..timing.device_errors import as_launch_failed
from .in_place import InPlaceCheck
from .repeated_call import RepeatedCall
from .snapshot import Snapshot

T = TypeVar("T")


class Runs(Protocol):
    """The session, of which the runs are; all ranks call the same methods."""

    @property
    def is_done(self) -> bool:
        """Whether the last run launched every winner."""

    def one_run(self, call: RepeatedCall[Any], put_back: Callable[[], None]) -> AbstractContextManager[None]:
        """Make the block, which makes the call, one run; raises PutAside where peers do not come.

        put_back: puts state back, where the call is captured and replayed before the block is left.
        """

    def take_result(self, result: Any) -> None:
        """Take the result of the run under way."""

    def repeat_run(self, call: RepeatedCall[Any]) -> None:
        """Make the last run once more: its configs again, no samples."""

    def found_in_place(self, found: str) -> str:
        """Return the finding of the lowest rank that has one."""

    def note(self, text: str) -> None:
        """Write a line of the log."""

    def end_checked(self, found: str, *, has_run: bool) -> None:
        """End the comparison of two runs; where something was `found`, the session too.

        has_run: the call has made a settled run before.
        """

    def close(self) -> None:
        """End the session."""


class Replay(Generic[T]):
    """Makes the runs of one call.

    beside: the result of a settled run that the call has made before. Then that is returned, and the runs
    here leave no effects, nor does one that raises. checks: compare the second run with the first, in place;
    makes_second: the search does not make it by itself.
    """

    def __init__(
        self,
        session: Runs,
        call: RepeatedCall[T],
        written: WrittenTensors,
        snapshot: Snapshot,
        beside: tuple[T] | None,
        *,
        checks: bool,
        makes_second: bool,
    ) -> None:
        self._session, self._call, self._written, self._beside = session, call, written, beside
        self._snapshot = snapshot
        self._check = InPlaceCheck(written) if checks else None  # until two runs are compared
        self._first: list[T] = []  # the result of the first run, until then
        self._makes_second = makes_second
        self._has_told = False  # what kernels are declared to change
        written.begin_runs(beside, records=checks)

    def result(self) -> T:
        """Make runs until every context is settled, then once more; return the last result."""
        if self._beside is None:
            return self._make_runs()
        try:
            return self._make_runs()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a broken device, as the run's own
                self._put_back()
            self._call.end_beside()
            raise

    def _make_runs(self) -> T:
        session, call, beside = self._session, self._call, self._beside
        while True:
            try:
                with session.one_run(call, self._put_back):
                    result = call()
                    session.take_result(result)
            except PutAside:
                if beside is not None:
                    self._put_back()
                return self._end(result)
            is_done = session.is_done
            if self._first and self._has_changed_in_place():
                return self._end(self._first[0], with_first=True)
            if is_done and beside is None:
                session.close()
                return self._end(result)
            if not is_done:
                self._keep_first(result)
            del result  # a trial's outputs must not add to the memory of the next
            self._put_back()
            if self._first and self._makes_second:
                session.repeat_run(call)
                if self._has_changed_in_place():
                    return self._end(self._first[0], with_first=True)
                self._put_back()
            if is_done and beside is not None:
                session.close()
                return self._end(beside[0])

    def _end(self, result: T, *, with_first: bool = False) -> T:
        if self._beside is None:
            self._call.end(with_first=with_first)
            return result
        self._call.end_beside()
        return self._beside[0]

    def _put_back(self) -> None:
        """Put back tensors that kernels declare as changed, and preserved state."""
        if (names := self._written.restore()) and not self._has_told:
            self._has_told = True
            text = f"put back before each further run, as restore_value or reset_to_zero names it: {names}"
            self._session.note(text)
        self._snapshot.restore()  # last: it is from before the call

    def _keep_first(self, result: T) -> None:
        """Copy tensors that the first run may have changed; keep its result if some rank compares."""
        if self._check is not None:
            self._check.copy()
            if self._check.remark:
                self._session.note(self._check.remark)
            if self._session.found_in_place("tensors" if self._check.compares else ""):
                self._first.append(result)

    def _has_changed_in_place(self) -> bool:
        """Compare the second run with the first; if they differ on some rank, put back what that left."""
        assert self._check is not None
        with as_launch_failed(if_reported=True):
            found = self._check.change()
        found = self._session.found_in_place(found)
        if found:
            self._check.put_back()
            if self._beside is not None:
                self._put_back()
        else:
            self._check = None
            self._first.clear()
        self._session.end_checked(found, has_run=self._call.has_run)
        return bool(found)
