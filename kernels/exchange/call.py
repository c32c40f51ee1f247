"""One call of an operation over symmetric memory, and how all ranks end it alike if one fails.

[Note: calls are numbered] Call n of a rank meets call n of its peers, or nothing. An eager call takes its
number before anything can fail, and ends in one of three ways, which its peers learn:

    made      this rank has pushed its part and waited for the parts of all peers
    refused   its arguments are wrong, or do not fit the signature. `_stand_in` replaces its part: the same
              permits, flags and waits, with a mark in place of rows. Peers that find the mark raise the
              reason, and may make the next call
    broken    anything else has failed. `_leave_peers` lets each peer that waits in this call, or comes to it,
              find this rank given up. No further call is possible; peers raise the cause

Reasons and causes travel from host to host beside the flags: see `bulletin`. On the CPU a call raises those
of its own number. On a GPU, where a call may end long after its host has returned, a later call raises them,
after its own part, so that the ranks stay at the same number.

A captured call takes no number: if it fails nothing has begun, and a graph repeats only what succeeded. Its
steps are the same, but events order its pushes: see `push`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch

from dist_autotune.for_operations import announce

from ..agreement.collective import Collective
from ..agreement.errors import PeerTimeout, RefusedByPeer
from ..symm import SymmetricMemoryError
from . import absence
from .operation import Operation
from .push import Pushes

NOT_AGREED = object()

Op = TypeVar("Op", bound="NumberedCalls")
P = ParamSpec("P")
R = TypeVar("R")


def numbered(method: Callable[Concatenate[Op, P], R]) -> Callable[Concatenate[Op, P], R]:
    """Let a call that does not fit the method's signature take its number, and fail on all ranks.

    It is made with the arguments that fit, as peers may need them for their part, and refused.
    """
    _, *parameters = inspect.signature(method).parameters.values()
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = [each.name for each in parameters if each.default is each.empty]
    names = {each.name for each in parameters}

    @functools.wraps(method)
    def made(self: Op, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the method
            self._misfit = error
        try:
            again: Callable[..., R] = method
            fitting = dict.fromkeys(needed) | dict(zip(by_position, args, strict=False))
            return again(self, **fitting | {name: kwargs[name] for name in names & kwargs.keys()})
        finally:
            self._misfit = None

    return made


class NumberedCalls(Operation):
    """An operation whose calls are numbered; a subclass supplies the steps of a call."""

    is_captured = False  # some call was captured: a graph may replay in its memory
    _agrees: ClassVar[bool] = True  # hosts agree by `_collective` on the way of a call
    _may_store = False  # its kernel may store to the peers, and takes their permits itself
    _way: ClassVar[str]  # the name of the `tunable` by which a rank chooses it
    _collective: Collective
    _pushes: Pushes
    _misfit: TypeError | None = None  # of the call under way, which is refused: see `numbered`

    def _open_collective(self, fixed: bool | None, **options: Any) -> Collective:
        """Return the collective that may replace such calls; fixed, options: see `Collective`."""
        return Collective(type(self).__name__, self._way, self._memory, fixed=fixed, **options)

    def _call(self, *given: Any) -> Any:
        """Make one call with the arguments `given`; raise what its steps raise, and failures of peers."""
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
            if self._misfit is not None:
                raise self._misfit
        except RefusedByPeer:  # on all ranks; none has begun the call
            self._raise_refused()
            raise
        except (PeerTimeout, MemoryError, torch.OutOfMemoryError) as error:  # not by wrong arguments
            if not is_capturing:
                self._break(error, given, None)
            raise
        except Exception as error:
            if not is_capturing:
                self._refuse(self._misfit or error, given)
            if self._misfit is not None:
                raise self._misfit from None
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
            if not is_capturing:
                self._break(error, given, None if way is NOT_AGREED else plan)
            elif isinstance(error, SymmetricMemoryError):
                raise RuntimeError(f"{type(self).__name__} cannot be captured here: {error}") from error
            raise
        if self._bulletin.bell[0] or not (self._facts.is_gpu or self._failures.are_none()):
            self._check_call()
        return result

    # ---- the steps, in their order

    @abc.abstractmethod
    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> Any:
        """Check the arguments; return the plan, which is cached for tensors of the same layouts."""

    @abc.abstractmethod
    def _agree(self, plan: Any, is_capturing: bool) -> Any:
        """Return the way that all ranks take in this call."""

    @abc.abstractmethod
    def _allocate_results(self, plan: Any, given: tuple[Any, ...]) -> Any:
        """Return the operands of the call, with tensors for its results."""

    @abc.abstractmethod
    def _exchange(self, plan: Any, operands: Any, way: Any, is_capturing: bool) -> Any:
        """Carry out the call and return its results.

        It writes operands to where peers read them, chooses, forks, gives permits, launches and pushes, and
        lowers flags.
        """

    # ---- calls that fail

    def _ask_peers(self) -> tuple[int, int] | None:
        """Return way and sizes of peers that went ahead, None without ballots; or raise RefusedByPeer."""
        return self._collective.refuse() if self._agrees else None

    def _check_peers(self) -> None:
        if self._agrees:
            self._collective.check()

    @abc.abstractmethod
    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        """Enqueue what peers and the next call need, in place of this rank's part of a call.

        went_ahead: see `_ask_peers`. given: the arguments, if the call was refused.
        """

    def _stand_in_by_pushes(self, flags: torch.Tensor, **ways: bool) -> None:
        words, mark = self._failures.words, self._failure_kinds.refusal.mark
        absence.stand_in(self._pushes, flags, words, mark, self._patience_ticks, **ways)

    def _leave_peers(self) -> None:
        """Give this rank up on each peer, from the first call without its part on."""
        takes_permits = self.is_captured or self._may_store  # a graph, or a kernel, beside the side stream
        absence.leave(self._pushes, self._patience_s(), behind_kernels=takes_permits)

    def _leave_hosts(self) -> None:
        if self._agrees:
            self._collective.leave()
        if self._meeting is not None:
            self._meeting.leave()

    def _refuse(self, error: Exception, given: tuple[Any, ...]) -> None:
        """Let a call with wrong arguments fail on all ranks, and leave the next call possible."""
        self._bulletin.tell_refused(self._calls, f"{type(error).__name__}: {error}")
        if self.world_size == 1:
            return
        try:
            with contextlib.suppress(RefusedByPeer):  # no rank has begun it
                went_ahead = self._ask_peers()
                if self._meeting is not None:
                    self._meet()
                self._stand_in(went_ahead, *given)
        except BaseException as failed:
            self._break(failed, given, None)
            raise failed from error

    def _break(self, error: BaseException, given: tuple[Any, ...], agreed: Any) -> None:
        """Refuse further calls after a failure, and tell the peers; raise if a peer failed before.

        agreed: the plan of the call, if all ranks have agreed on its way.
        """
        if self._broken_by:
            return
        with contextlib.suppress(RuntimeError):  # it is raised below
            self._raise_of_peers(self._calls)
        is_first = not self._broken_by
        if is_first:
            self._broken_by = f"call {self._calls} was not carried out: {error!r}"
        if isinstance(error, PeerTimeout) and is_first:  # a third rank is late: each peer finds that itself
            self._leave_hosts()
        elif self.world_size > 1:
            if is_first:
                self._bulletin.tell_broken(self._calls, repr(error))
            with contextlib.suppress(Exception):  # this is the way out of an error that says more
                self._make_owed_collectives(given, agreed)
            with contextlib.suppress(Exception):
                self._leave_hosts()
                if self._bulletin.is_shared:  # else peers time out
                    self._leave_peers()
        if not is_first:  # a peer's failure has caused this one
            raise RuntimeError(self._text_of_broken()) from error

    def _make_owed_collectives(self, given: tuple[Any, ...], agreed: Any) -> None:
        """Make the collectives that the group still waits for, with any data.

        They are those of the failed call, and of later calls in which peers went ahead.
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
        """Return a function for each collective of such a call, which makes it with any data."""
        return []
