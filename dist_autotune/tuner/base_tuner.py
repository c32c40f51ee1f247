"""The common base of tuned functions and step tuners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import settings
from ..errors import InvalidOption, TuningError
from ..formatting import escaped
from ..options import Options
from ..triton_api.interception import INTERCEPTION, has_driver, is_interpreted
from .report import TUNERS, Tuners, TuningReport

if TYPE_CHECKING:
    from ..storage.scope import FunctionScope
    from .calls import Calls

_STRENGTH = ("any", "check", "same")  # of `bits`


class BaseTuner:
    """The calls of one function or loop, made when there is the first one, and their report.

    function: its source text names the results that are not shared; None: there is none.

    Raises InvalidOption for options that do not suit the function, if the mode tunes.
    """

    _calls: Calls | None = None

    def __init__(self, function: Callable[..., Any] | None, options: Options, name: str) -> None:
        mode = settings.run_mode()
        if mode == "tune":
            _check_possible(options, has_function=function is not None)
        if mode != "off":
            from . import calls  # noqa: F401  0.1 s, which are none of the first step's
        self.options = options
        vars(self).pop("_calls", None)  # of a tuned function that this one wraps
        self._function, self._name = function, escaped(name)
        self._joined: FunctionScope | None = None  # the function around it that does what this one asks for
        self._has_left = False  # with the mode off: launches outside have what they need

    def __del__(self, tuners: Tuners = TUNERS) -> None:  # an argument: at exit globals may be gone
        tuners.leave(self)

    @property
    def report(self) -> TuningReport | None:
        """The findings of the last session, or of the one under way so far; None before the first."""
        return None if self._calls is None else self._calls.report

    @property
    def settled(self) -> bool:
        """Whether nothing is left to try: the moment to capture a CUDA graph. With the mode off, always."""
        return settings.run_mode() == "off" or (self._calls is not None and self._calls.settled)

    @property
    def untuned(self) -> tuple[tuple[str, Any, str], ...]:
        """(kernel, key, reason) of launched keys that stay untuned, though nothing more will be tried."""
        return () if self._calls is None else self._calls.untuned

    def retune(self) -> None:
        """Tune anew at the next call, whatever memory and disk hold.

        Called on some ranks only, it is taken up by all of them a few calls later (not with `watch=False`).
        """
        self._made_calls().retune()

    def _join_or_leave(self, mode: str) -> None:
        """Begin a call that is a part of another one, or of none with the mode off."""
        if mode == "off":
            if not self._has_left and not has_driver():  # stock Triton could not benchmark
                from ..launch.fast_path import dispatcher

                INTERCEPTION.install(dispatcher)
            self._has_left = True
            return
        around = INTERCEPTION.call_around()
        function = None if around is None else around.launcher.function
        if function is not None and function is not self._joined:
            _check_joins(self._name, self.options, function.name, function.options)
            self._joined = function

    def _made_calls(self) -> Calls:
        if self._calls is None:
            from .calls import Calls  # imports all that a session needs: only for a call

            self.options = self.options.at_first_call()
            made = Calls(self._function, self.options, self._name)
            vars(self).setdefault("_calls", made)  # in one step: several threads may make the first call
            TUNERS.add(self)
        assert self._calls is not None
        return self._calls


def _check_possible(options: Options, *, has_function: bool) -> None:
    """Raise InvalidOption for options that would only fail, or do another thing, in the first call."""
    options.check_bits(has_function=has_function)
    if options.objective == "graph" and not (torch.cuda.is_available() or is_interpreted()):
        raise InvalidOption(
            "objective='graph': replays of a CUDA graph judge, and torch.cuda.is_available() is False here. "
            "Leave it out on machines without a GPU; TRITON_INTERPRET=1 makes calls in place of replays."
        )


def _check_joins(name: str, inner: Options, outer_name: str, outer: Options) -> None:
    """Raise TuningError where an inner function has an option that the outer one lacks, with both values."""
    for option, asked, given in _unmet(inner, outer):
        can = outer.mode == "replay" or option in ("is_dist", "group") or asked == "'thunk'"
        advice = (
            f"Give {outer_name} {option}={asked} too" if can else f"Call {name} between runs of {outer_name}"
        )
        raise TuningError(
            f"{name} with {option}={asked} was called inside {outer_name} with {option}={given}, whose "
            f"session it joins and which does not do that. {advice}, or leave it out of {name}."
        )


def _unmet(inner: Options, outer: Options) -> Iterator[tuple[str, Any, Any]]:
    """Yield (option, value of the inner function, of the outer one) for options that the outer lacks."""
    if inner.is_dist and not outer.is_dist:
        yield "is_dist", True, False
    if inner.is_dist and outer.is_dist and (of_inner := _ranks(inner)) - (of_outer := _ranks(outer)):
        yield "group", f"ranks {sorted(of_inner)}", f"ranks {sorted(of_outer)}"
    bits = inner.bits, outer.bits
    if _STRENGTH.index(bits[0]) > _STRENGTH.index(bits[1]):
        yield "bits", repr(bits[0]), repr(bits[1])
    kept = {id(each) for each in outer.preserve}
    if outer.mode == "replay" and any(id(each) not in kept for each in inner.preserve):
        yield "preserve", _kinds(inner.preserve), _kinds(outer.preserve)
    compared = kept.union(map(id, outer.outputs))
    if inner.bits != "any" and any(id(each) not in compared for each in inner.outputs):
        yield "outputs", _kinds(inner.outputs), _kinds(outer.outputs)
    if inner.objective not in ("kernel", outer.objective):
        yield "objective", repr(inner.objective), repr(outer.objective)
    if (inner.mode, outer.mode) == ("online", "replay"):
        yield "mode", repr(inner.mode), repr(outer.mode)


def _ranks(options: Options) -> set[int]:
    if not (dist.is_available() and dist.is_initialized()):
        return set()
    group = options.process_group()
    return set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _kinds(items: Sequence[Any]) -> str:
    return f"[{', '.join(type(each).__name__ for each in items)}]"
