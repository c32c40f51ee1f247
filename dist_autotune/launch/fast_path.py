"""Launches of settled keys: one look-up, then the launch that stock Triton would make.

[Note: settled calls take no lock] Any number of them run at once and share one `Settled`, to which keys are
added one at a time. Where contexts choose anew, a new `Settled` replaces it (`Dispatcher.settled_call`, which
locks only then); calls under way keep the old one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any, Protocol, TypeAlias

from triton.runtime.autotuner import Autotuner

from ..storage.scope import FunctionScope
from ..triton_api.interception import INTERCEPTION, Run, has_driver, is_capturing, is_interpreted
from ..triton_api.launch import Key, Launch, key_of
from .incumbents import IncumbentLauncher
from .rank_context import NONE_FAILED, RankContext
from .tunable import Ranks
from .written_tensors import WrittenTensors, written_arguments

_MAKE = object.__new__
Settled: TypeAlias = "dict[int, SettledKeys]"  # by the id of a living Autotuner


class Launcher(Protocol):
    """Makes launches that are not settled: of a tuned function, or of no call."""

    @property
    def passes_single(self) -> bool: ...  # a kernel with one config is left to stock Triton
    @property
    def function(self) -> FunctionScope | None: ...  # whose calls they are
    def launch(self, call: CallUnderWay, launch: Launch, failed: Mapping[str, str] = NONE_FAILED) -> Any: ...
    def choose(
        self, call: CallUnderWay, name: str, options: Sequence[Any], key: Key, among: Ranks
    ) -> Any: ...
    def failure(
        self, call: CallUnderWay, launch: Launch, config: Any, error: Exception
    ) -> dict[str, str]: ...


class SettledKeys:
    """The settled keys of one Autotuner, dropped with it."""

    __slots__ = ("by_key", "call", "configs", "only", "tuner")

    def __init__(self, tuner: Autotuner, settled: Settled) -> None:
        place = id(tuner)
        self.tuner = weakref.ref(tuner, lambda _: settled.pop(place, None))
        self.by_key: dict[Key, tuple[Any, dict[str, Any]]] = {}
        self.call: CallUnderWay | None = None  # the last one that launched it
        # The config for all keys, while the kernel has one: peers may have more, this rank cannot try them.
        # In a session of several ranks it tells them so of each key.
        self.only: tuple[Any, dict[str, Any]] | None = None
        self.configs: list[Any] | None = None  # of the Autotuner when `only` was set


class CallUnderWay:
    """The launches of one call of a tuned function, or of one run of a session, from any thread.

    Measured costs: docs/benchmarks.

    launcher: makes the launches that are not settled. tunes: launches may be trials. written: copies what
    launches change; None: not in a session.
    """

    announced: dict[str, None] | None = None  # lines about operations of the runs, each once; None: no run

    def __init__(self, launcher: Launcher, *, tunes: bool, written: WrittenTensors | None = None) -> None:
        self.launcher, self.tunes, self.written = launcher, tunes, written
        self.is_compiling = False  # in a launch of a session's run
        self.settled: Settled = {}  # keys whose config is launched at once; empty in a run of a session
        self.repeats = False  # a run that is captured: each launch takes its config once more
        self.changes = False  # a launch changes tensors, of a kernel that `launched` does not return
        self.new: set[RankContext] | None = None  # new or provisional, launched by this settled call

    def another(self) -> CallUnderWay:
        """Return a call that knows the same keys and has met nothing new, in 0.3 us."""
        call = _MAKE(CallUnderWay)
        call.__dict__ = self.__dict__.copy()
        return call

    def add(self, tuner: Autotuner, key: Key, config: Any) -> None:
        """Launch this config at once from now on, in later calls too."""
        known = self._known(tuner)
        known.by_key[key] = config, config.all_kwargs()
        if len(tuner.configs) == 1 and not self.is_of_session:
            known.only, known.configs = known.by_key[key], [config]

    def add_single(self, tuner: Autotuner) -> None:
        """Launch the one config of a kernel at once from now on, as stock Triton would."""
        known, config = self._known(tuner), tuner.configs[0]
        known.only, known.configs = (config, config.all_kwargs()), [config]

    def _known(self, tuner: Autotuner) -> SettledKeys:
        if (known := self.settled.get(id(tuner))) is None:
            known = self.settled[id(tuner)] = SettledKeys(tuner, self.settled)
        return known

    def launched(self) -> list[Autotuner]:
        """Return the Autotuners that this call has launched at once."""
        launched = [known.tuner() for known in list(self.settled.values()) if known.call is self]
        return [tuner for tuner in launched if tuner is not None]

    def keep(self, launch: Launch) -> None:
        """Note that a launch changes tensors, and in a session copy them before it does."""
        self.changes |= bool(written_arguments(launch.tuner))
        if self.written is not None:
            self.written.keep(launch)

    @property
    def is_of_session(self) -> bool:
        """Return whether this is a run of a session."""
        return self.written is not None

    @property
    def changes_tensors(self) -> bool:
        """Return whether kernels of this call say that they change tensors."""
        return self.changes or any(map(written_arguments, self.launched()))


INCUMBENTS = CallUnderWay(IncumbentLauncher(), tunes=False)  # of what belongs to no run


def dispatcher(before: Run) -> Run:
    """Return the function that replaces `before`, an `Autotuner.run`, for good."""
    calls, call_of, call_of_others = INTERCEPTION.calls, INTERCEPTION.calls.get, INTERCEPTION.call_of_others
    is_stock = before.__module__ == Autotuner.__module__
    outside = None if has_driver() and not is_interpreted() else _outside_without_driver(before)

    def launch_unknown(call: CallUnderWay, tuner: Autotuner, args: Any, kwargs: dict[str, Any]) -> Any:
        if len(tuner.configs) > 1 or not call.launcher.passes_single:
            return call.launcher.launch(call, Launch(tuner, args, kwargs))
        changes = tuner.restore_value or tuner.reset_to_zero or call.is_of_session
        if changes and not (kwargs.get("warmup") or is_capturing()):
            call.keep(Launch(tuner, args, kwargs))
        if is_stock and not call.tunes:
            call.add_single(tuner)
        return before(tuner, *args, **kwargs)

    @functools.wraps(before)
    def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if not calls:
            return (outside or before)(tuner, *args, **kwargs)
        call = call_of(get_ident()) or call_of_others() or INCUMBENTS
        known = call.settled.get(id(tuner))
        if known is None or (known.configs and known.configs != tuner.configs) or kwargs.get("warmup"):
            return launch_unknown(call, tuner, args, kwargs)
        known.call = call
        try:
            config, options = known.only or known.by_key[key_of(tuner, args, kwargs)]
        except (KeyError, TypeError):  # new, or a key that cannot be hashed
            return call.launcher.launch(call, Launch(tuner, args, kwargs))
        tuner.best_config = config
        try:
            if config.pre_hook is not None:
                named = dict(zip(tuner.arg_names, args, strict=False))
                config.pre_hook({**named, **kwargs, **options})
            return tuner.fn.run(*args, **kwargs, **options)
        except Exception as error:
            if known.only and call.launcher.passes_single:
                raise
            if not (failed := call.launcher.failure(call, Launch(tuner, args, kwargs), config, error)):
                raise
        return call.launcher.launch(call, Launch(tuner, args, kwargs), failed)

    return run


def _outside_without_driver(before: Run) -> Run:
    """Return the launch path outside of calls on machines without a GPU, where stock benchmarking raises."""

    def outside(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        try:
            return before(tuner, *args, **kwargs)
        except RuntimeError as error:  # of stock's benchmarking, before it launches anything
            if "active drivers" not in str(error):
                raise
        return INCUMBENTS.launcher.launch(INCUMBENTS, Launch(tuner, args, kwargs))

    return outside
