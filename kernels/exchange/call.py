"""One call of an operation over symmetric memory, from its number to its end.

[Note: calls are numbered] Call n of a rank meets call n of its peers, or nothing. Each eager call takes a
number before anything can fail, and a rank answers for every number that it has taken, in one of three ways:

    made      its part has been pushed, and it has waited for the parts of all peers
    refused   its arguments are wrong. It stands in for its part (`_stand_in`): permits, flags and waits as
              in any call, and a mark in place of rows. Peers find the mark, raise the reason and go on
    broken    something else has failed. It leaves (`_leave_peers`): each peer that comes to the call, or
              waits in it, finds this rank given up. It takes no further call; peers raise the cause

Reasons and causes travel beside the flags, from host to host: see `bulletin`. On the CPU a call raises those
of its own number. On a GPU, where a call may end long after its host has left it, a later one does, behind
its own part, so that the ranks stay at one number.

A captured call takes no number: what fails then has not begun, and a graph repeats what was right. Its
steps are the same, save that events order its pushes: see `push`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from dist_autotune.for_operations import announce

from ..agreement.collective import Collective
from ..agreement.errors import PeerTimeout, RefusedByPeer
from ..symm import SymmetricMemoryError
from . import absence
from .operation import Operation
from .push import Pushes

NOT_AGREED = object()


class NumberedCalls(Operation):
    """An operation whose calls are made as this module says; it supplies the steps that are its own."""

    is_captured = False  # some call was: a graph may replay in its memory
    _agrees: ClassVar[bool] = True  # hosts agree on the way of a call, by `_collective`
    _may_store = False  # a kernel stores to the peers, and takes their permits itself
    _way: ClassVar[str]  # the name of the `tunable` by which a rank chooses it
    _collective: Collective
    _pushes: Pushes

    def _open_collective(self, fixed: bool | None, **options: Any) -> Collective:
        """Return the collective of such calls; fixed, options: see `Collective`."""
        return Collective(type(self).__name__, self._way, self._memory, fixed=fixed, **options)

    def _call(self, *given: Any) -> Any:
        """Make one call; `given` is what its steps take. Raises what they raise, and what peers have told."""
        self._check_usable()
        announce(self.transport)
        is_capturing = self._is_capturing()
        if is_capturing:
            self.is_captured = True
        else:
            self._calls += 1
        try:
            plan = self._plan(given, is_capturing)
            self._follow(is_capturing=is_capturing)
        except RefusedByPeer:  # all hosts know, and none has begun the call
            self._raise_refused()
            raise
        except (PeerTimeout, MemoryError, torch.OutOfMemoryError) as error:  # it is no fault of the arguments
            if not is_capturing:
                self._break(error, given, None)
            raise
        except Exception as error:
            if not is_capturing:
                self._refuse(error, given)
            raise
        way: Any = NOT_AGREED
        try:
            way = self._agree(plan, is_capturing)
            operands = self._allocate_results(plan, given)
            if self._meeting is not None and not is_capturing:
                self._meet()
            result = self._exchange(plan, operands, way, is_capturing)
        except RefusedByPeer:
            self._raise_refused()
            raise
        except BaseException as error:
            if is_capturing:
                self._explain_capture(error)
            else:
                self._break(error, given, None if way is NOT_AGREED else plan)
            raise
        if self._bulletin.bell[0] or not (self._facts.is_gpu or self._failures.are_none()):
            self._check_call()
        return result

    # ---- the steps, in their order

    @abc.abstractmethod
    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> Any:
        """Check the arguments; return what calls with tensors that lie alike share, which is cached."""

    @abc.abstractmethod
    def _agree(self, plan: Any, is_capturing: bool) -> Any:
        """Return the way that all ranks take in this call."""

    @abc.abstractmethod
    def _allocate_results(self, plan: Any, given: tuple[Any, ...]) -> Any:
        """Return the operands of the call, with the tensors that get its results."""

    @abc.abstractmethod
    def _exchange(self, plan: Any, operands: Any, way: Any, is_capturing: bool) -> Any:
        """Carry out the call and return its results.

        It writes operands to where peers read them, chooses, forks, gives permits, launches and pushes, and
        lowers flags.
        """

    # ---- calls that fail

    def _ask_peers(self) -> tuple[int, int] | None:
        """Return way and terms of peers that are ahead, None without ballots; or raise RefusedByPeer."""
        return self._collective.refuse() if self._agrees else None

    def _check_peers(self) -> None:
        if self._agrees:
            self._collective.check()

    @abc.abstractmethod
    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        """Enqueue, in place of this rank's part of a call, what its peers and the next call need.

        went_ahead: see `_ask_peers`. given: what the call was given, if it was refused.
        """

    def _stand_in_by_pushes(self, flags: torch.Tensor, *, counted: bool) -> None:
        words, mark = self._failures.words, self._failure_kinds.refusal.mark
        absence.stand_in(self._pushes, flags, words, mark, self._patience_ticks, counted=counted)

    def _leave_peers(self) -> None:
        """Let each peer find this rank given up, in the first call that it has taken no part in."""
        takes_permits = self.is_captured or self._may_store  # a graph, or a kernel, beside the side stream
        absence.leave(self._pushes, self._patience_s(), behind_kernels=takes_permits)

    def _leave_hosts(self) -> None:
        if self._agrees:
            self._collective.leave()
        if self._meeting is not None:
            self._meeting.leave()

    def _refuse(self, error: Exception, given: tuple[Any, ...]) -> None:
        """Answer for a call with wrong arguments: it fails on all ranks, and the next is as any other."""
        self._bulletin.tell_refused(self._calls, f"{type(error).__name__}: {error}")
        if self.world_size == 1:
            return
        try:
            with contextlib.suppress(RefusedByPeer):  # nobody has begun it
                went_ahead = self._ask_peers()
                if self._meeting is not None:
                    self._meet()
                self._stand_in(went_ahead, *given)
        except BaseException as failed:
            self._break(failed, given, None)
            raise failed from error

    def _break(self, error: BaseException, given: tuple[Any, ...], agreed: Any) -> None:
        """Take no more calls after one that has failed, and tell the peers; raise what has broken theirs.

        agreed: the plan of the call, if all ranks have agreed on its way.
        """
        if self._broken_by:
            return
        with contextlib.suppress(RuntimeError):  # it is raised below
            self._raise_of_peers(self._calls)
        is_first = not self._broken_by
        if is_first:
            self._broken_by = f"call {self._calls} was not carried out: {error!r}"
        if isinstance(error, PeerTimeout) and is_first:  # of a third rank, which each peer names by itself
            self._leave_hosts()
        elif self.world_size > 1:
            if is_first:
                self._bulletin.tell_broken(self._calls, repr(error))
            with contextlib.suppress(Exception):  # this is the way out of an error that says more
                self._make_owed_collectives(given, agreed)
            with contextlib.suppress(Exception):
                self._leave_hosts()
                if self._bulletin.is_shared:  # else peers wait, and tell by themselves that it does not come
                    self._leave_peers()
        if not is_first:  # it has failed here as it has there
            raise RuntimeError(self._text_of_broken()) from error

    def _make_owed_collectives(self, given: tuple[Any, ...], agreed: Any) -> None:
        """Make the collectives of a call that has failed, without its data: the group waits for this rank.

        And those of later calls in which peers have gone ahead.
        """
        if not self._agrees:
            return
        if agreed is None:
            went_ahead = self._collective.ahead()
            if went_ahead is not None:
                self._stand_in(went_ahead, *given)
        elif self._collective.made is not None:
            for make in self._collectives(agreed)[self._collective.made :]:
                make()
        while (went_ahead := self._collective.leave_next()) is not None:
            self._stand_in(went_ahead, *given)

    def _collectives(self, plan: Any) -> list[Callable[[], None]]:
        """Return what makes each collective of such a call, with any data."""
        return []

    def _explain_capture(self, error: BaseException) -> None:
        if isinstance(error, SymmetricMemoryError):
            raise RuntimeError(f"{type(self).__name__} cannot be captured here: {error}") from error
