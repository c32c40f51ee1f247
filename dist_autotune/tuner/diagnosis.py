"""Reports the failures of a session, and warns of programs that look wrong."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .. import settings
from ..errors import AgreementTimeout, LaunchFailed, LaunchTimeout, NoValidConfig, PeerFailed, warn
from ..formatting import config_label, described
from ..logs.records import RunFailed
from ..ranks.watchdog import Watch
from ..search.orders import ContextOrder
from ..timing.device_errors import DeviceFailed, first_line, is_reported
from .function_state import FunctionSetup, FunctionState
from .rank_run import RankRun
from .recorder import Recorder

LISTED = 6  # launches that a message names
_NEXT_STEP = {
    LaunchTimeout: "Nothing can end a launch from outside: end the process. Take this config out of the "
    "kernel's list, or raise timeout_s= if it is only slow.",
    LaunchFailed: "After most such errors the process cannot use the device any more: start it again, "
    "without that config; compute-sanitizer finds the faulty access.",
}


def listed(launched: Sequence[str]) -> str:
    more = f" and {len(launched) - LISTED} more" if len(launched) > LISTED else ""
    return "; ".join(launched[:LISTED]) + more or "nothing"


class Diagnosis:
    """Describes the failures of one session on this rank by run, launches and log."""

    def __init__(self, state: FunctionState, recorder: Recorder, log_dir: str | None) -> None:
        self._state, self._recorder, self._log_dir = state, recorder, log_dir
        self._rank = state.function.group.rank
        self.write_stuck = functools.partial(write_stuck, recorder.note)

    def of_error(self, error: BaseException) -> BaseException:
        """Return the error that peers receive for `error`.

        A device's error names the launches that may have caused it: one of ours in its own text; for one that
        the function raised, the peers receive another error.
        """
        is_ours, state = isinstance(error, LaunchFailed | LaunchTimeout), self._state
        if not (is_ours or is_reported(error)):
            return error
        where = f"Rank {self._rank}: run {state.orders.runs} of {state.function.name}"
        happened = str(error) if is_ours else f"raised {first_line(error)}"
        kind = LaunchTimeout if isinstance(error, LaunchTimeout) else LaunchFailed
        what = "Not ended" if kind is LaunchTimeout else "This run had launched"
        launched = listed(state.dispatcher.launched())
        text = f"{where}: {happened}. {what}: {launched}. {self._own_log()}{_NEXT_STEP[kind]}"
        if is_ours:
            error.args = (text,)
            return error
        self.write_stuck(text)
        return DeviceFailed(text)

    def record_failure(self, error: BaseException, by_rank: int) -> None:
        """Write to the log that the run under way has failed."""
        text = described(error).replace("\n", " ")[:500]
        if isinstance(error, PeerFailed):
            text = f"rank {error.rank}: {error.error}"
        self._recorder.write(RunFailed(run=self._state.orders.runs, by_rank=by_rank, error=text))

    def note_options(self, error: NoValidConfig) -> None:
        """Say in a note to `error` which options were on trial: what only they launch may have no config."""
        for context in self._state.orders.contexts.values():
            option = context.next_launch.planned
            if context.is_choice and option not in (-1, context.result.incumbent):
                gave = f"tunable({context.kernel!r}) gave {context.texts[option]} in this run"
                advice = "Leave that option out where its kernels have no config that works"
                error.add_note(f"{gave}. {advice}: see docs/options.md.")

    def record_failed_exchange(self, error: BaseException) -> None:
        """Write to the log that an exchange has failed; a time-out names the logs of the missing ranks."""
        if type(error) is AgreementTimeout and self._log_dir is not None:
            files = ", ".join(f"{self._log_dir}/rank-{rank}.jsonl" for rank in error.missing_ranks)
            error.args = (f"{error} Last records: {files}",)
        self.record_failure(error, getattr(error, "rank", self._rank))

    def watch(self) -> Watch:
        """Return how the next run is watched, named after its first trial."""
        state, function = self._state, self._state.function
        what = f"run {state.orders.runs} of {function.name}"
        on_trial = [context for context in state.orders.unsettled if context.next_launch.trial >= 0]
        if on_trial:
            first, more = on_trial[0], f" and {len(on_trial) - 1} more" if len(on_trial) > 1 else ""
            what += f" ({first.title} with {config_label(first.texts[first.next_launch.trial])}{more})"
        return Watch(what, function.timeout_s, function.options.on_stuck, self.write_stuck, self._whereabouts)

    def _whereabouts(self) -> str:
        """Return the position of the run under way; asked on another thread."""
        return f"Not ended, or on trial: {listed(self._state.dispatcher.launched())}. {self._own_log()}"

    def _own_log(self) -> str:
        return "" if self._log_dir is None else f"Log: {self._log_dir}/rank-{self._rank}.log. "


def write_stuck(note: Callable[[str], None], text: str) -> None:
    """Say why this process may be stuck: by `note`, and on stderr; any thread may."""
    note(text)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
        sys.stderr.write(f"dist_autotune: {text}\n")
        sys.stderr.flush()


_warned: set[str] = set()


def _warn_once(about: str, text: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warn(text)


def warn_of_ranks_alone(name: str, *, is_dist: bool) -> None:
    """Warn once if the ranks tune each for itself: without `is_dist`, or for want of a process group."""
    in_group = dist.is_available() and dist.is_initialized()
    if not is_dist and in_group and (ranks := dist.get_world_size()) > 1:
        _warn_once(
            "is_dist",
            f"{name} is tuned without is_dist=True in a group of {ranks} ranks: each makes its own number of "
            "runs and picks its own configs, so kernels that wait for peers hang. Pass is_dist=True; if each "
            "rank should tune alone, silence this with warnings.filterwarnings.",
        )
    if is_dist and not in_group and (ranks := settings.world_size()) > 1:
        _warn_once(
            "group",
            f"{name} has is_dist=True, and {ranks} ranks were started (WORLD_SIZE={ranks}), but there is no "
            "process group: each rank tunes alone and picks its own configs, so kernels that wait for peers "
            "hang. Call torch.distributed.init_process_group() before the first call; if each rank should "
            "tune alone, leave out is_dist=True.",
        )


def changed_in_place(name: str, found: str, *, has_run: bool) -> str:
    """Return the warning where a second run of a function has changed values that the first one left.

    has_run: a settled run that met a new key came before; its effects stay beside those of the first run.
    """
    call, runs = ("call, which had met a new key,", "two runs") if has_run else ("call", "its first run")
    return (
        f"{name} changes {found}, in place: a second run with the same configs left other values. They were "
        f"put back, the {call} ended with {runs}, and its keys stay untuned until retune(). Name the "
        'tensor in preserve=, or in restore_value of the kernel, or use mode="online".'
    )


def warning_at_end(
    function: FunctionSetup, run: RankRun, launched: Sequence[ContextOrder], *, has_failed: bool
) -> str:
    """Return the warning at a session's end: a useless clock, no launches, or none of some contexts."""
    starved = [each.title for each in launched if each.is_left and each.status == "starved"]
    if not has_failed and run.has_time is False:
        text = (
            f"{function.name}: {type(function.clock).__name__} returned only times that are not finite or "
            "not positive, so every kernel keeps its first config. dist_autotune.Clock documents the return "
            "value."
        )
        _warn_once(f"clock of {function.name}", text)
        return text
    if not has_failed and not run.launched:
        return "no kernel with several configs was launched: decorate the function that launches one"
    return f"no longer launched, settled with the samples so far: {', '.join(starved)}" if starved else ""
