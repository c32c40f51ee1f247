"""The report of a tuned function's last session, and the findings of all tuners of a process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import formatting
from ..formatting import config_label, context_label, counted, format_ms
from ..search.budget import Forecast, StepTimes
from ..search.phases.pace import Cost
from ..search.phases.step_gain import StepGain, cost_and_gain
from ..search.rules import BY_LAUNCH, BY_RUN
from ..timing.time_spent import SecondsSpent

if TYPE_CHECKING:
    from rich.console import Group

    from .base_tuner import BaseTuner

MOST_LABELS = 4  # contexts that a remark names


def percent_over(ms: float | None, reference_ms: float | None) -> float | None:
    """Return by how many percent `ms` is above `reference_ms`; None where either is unknown."""
    return None if ms is None or not reference_ms else (ms / reference_ms - 1) * 100


@dataclass(frozen=True)
class TunedContext:
    """One kernel with one key, and its winner."""

    kernel: str
    key: Any
    config: Any  # the winning triton.Config, or the winning option of a `tunable`; None: there is none
    ms: float | None = None  # agreed over the ranks; None: never timed
    fastest_rank_ms: float | None = None  # of the winner; `ms` is that of the slowest
    status: str = "tuned"  # | "cached" | "starved" | "partial" | "tuning" | "unfinished": it was dropped
    timings: Mapping[str, float] = field(default_factory=dict)  # candidate's text -> agreed ms
    banned: Mapping[str, str] = field(default_factory=dict)  # candidate's text -> reason
    launch_bound: bool = False  # the device waited for the host, whose part is in the times
    default_ms: float | None = None  # agreed, of the candidate that is launched untuned
    judge: str = BY_LAUNCH  # what the times are of: one "launch", or the whole "run" of the function
    launches: int = 1  # on this rank in one run
    key_text: str = ""  # as in the log; empty: made from `key`
    same_bits: bool | None = None  # the winner leaves the first config's outputs; None: not verified
    again: str = ""  # which candidates were raced after an upgrade; empty: there was none
    untried: str = ""  # what was not tried, and why
    not_fastest: str = ""  # why the winner is not the fastest in `timings`; empty: it is

    def __str__(self) -> str:
        label, ms, _, status, timed, banned, _, config = self._cells(world_size=1)
        return f"{label}: {config}, {ms} ms, {status} ({timed} timed, {banned} banned)"

    @property
    def label(self) -> str:
        """`kernel[key]`, as logs and the command line show it."""
        key = self.key if isinstance(self.key, tuple) else (self.key,)
        return context_label(self.kernel, self.key_text or ", ".join(map(str, key)))

    @property
    def spread_percent(self) -> float | None:
        """How much longer the agreed time of the winner is than the fastest rank's; None: not timed."""
        return percent_over(self.ms, self.fastest_rank_ms)

    @property
    def gain_percent(self) -> float | None:
        """How much less time the winner takes than the default config; None: one has no time."""
        over = percent_over(self.ms, self.default_ms)
        return None if over is None else -over

    @property
    def no_gain_reason(self) -> str:
        """Why there is no gain; empty: there is one."""
        if self.gain_percent is not None:
            return ""
        if self.status == "unfinished":
            return "its search was given up"
        if self.config is None:
            return "no config is known to work"
        if self.status == "cached":
            return "from the cache, timed by an earlier session"
        if self.ms is None:
            return "no config has a time yet" if not self.timings else "the winner has no agreed time"
        if self.again:
            return "the first config was not among the best before an upgrade"
        return "the first config was not timed"

    @property
    def run_ms(self) -> float | None:
        """Milliseconds that its launches take in one run; None: unknown, or judged by the whole run."""
        return self.ms * self.launches if self.ms is not None and self.judge == BY_LAUNCH else None

    def unfinished(self) -> TunedContext:
        """Return the context as it stands after its search was dropped."""
        if self.status != "tuning":
            return self
        return replace(self, status="unfinished", config=None, ms=None, fastest_rank_ms=None)

    def _cells(self, world_size: int) -> tuple[str, ...]:
        is_known = self.spread_percent is not None and world_size > 1
        spread = f"{self.spread_percent:.1f} %" if is_known else "-"
        status = formatting.status_label(self.status, launch_bound=self.launch_bound)
        counts = str(len(self.timings)), str(len(self.banned))
        bits = formatting.bits_label(self.same_bits)
        config = "-" if self.config is None else config_label(self.config)
        return (self.label, format_ms(self.ms), spread, status, *counts, bits, config)


@dataclass(frozen=True)
class TuningReport:
    """The contexts of one session; `str` of it is a table."""

    runs: int  # executions of the tuned function, the final one included
    contexts: tuple[TunedContext, ...]  # those that take most of a run's time first
    world_size: int = 1
    seconds: float = 0.0
    clock: str = ""  # class name
    log_dir: str | None = None
    warning: str = ""
    spent: SecondsSpent = field(default_factory=SecondsSpent)
    cost: Cost | None = None  # of the session to the program, online
    gain: StepGain | None = None  # of a step, compared at the end of an online session
    outlook: Forecast | None = None  # what is still to be tried; None: the session is over
    function: str = ""
    session: str = ""  # its name, the same on all ranks and in the logs
    operations: tuple[str, ...] = ()  # how those of its runs send data between ranks, and why so, a line each
    earlier: tuple[TunedContext, ...] = ()  # of the function, settled by earlier sessions of this process
    earlier_s: float = 0.0  # what all those sessions have cost the program

    def share_percent(self, context: TunedContext) -> float | None:
        """Return the share of `context` in the launches of one run that are timed; None: unknown."""
        total = sum(each.run_ms or 0.0 for each in self.contexts)
        return None if context.run_ms is None or not total else 100 * context.run_ms / total

    @property
    def cost_s(self) -> float:
        """Return the seconds that the session has cost the program; in replay all of it."""
        return self.seconds if self.cost is None else self.cost.total_s

    @property
    def step(self) -> StepTimes | None:
        """The time of one run without and with tuning, as far as both are known."""
        return step_times(self.contexts)

    def __str__(self) -> str:
        from .. import tables  # rich, which nothing else here needs

        logs = [] if self.log_dir is None else [f"Logs: {self.log_dir}"]
        return "\n".join([self.heading, *tables.as_lines(self.table), *self.remarks, *logs])

    def ending(self, outcome: str) -> str:
        """Return the last line of a session's progress."""
        ended = f"{outcome} after {counted(self.runs, 'run')}"
        times = ended if self.step is None else f"{ended}: {self.step}"
        return "; ".join([times, *cost_and_gain(self.cost, self.gain)])

    @property
    def heading(self) -> str:
        """The number of contexts and runs, and a second line where times are no figures of a device."""
        work = f"{counted(len(self.contexts), 'context')} in {counted(self.runs, 'run')}"
        found = f"{work} on {counted(self.world_size, 'rank')}, {self.seconds:.1f} s"
        is_wall_clock = self.clock == formatting.WALL_CLOCK
        return f"{found}\n{formatting.WALL_CLOCK_NOTE}" if is_wall_clock else found

    @property
    def table(self) -> Group:
        """The contexts, for a terminal of any width."""
        from rich.console import Group

        from .. import tables

        columns = ("context", ">ms", ">spread", "status", ">timed", ">banned", "bits", "winner")
        found = {"": self.contexts, "Of earlier sessions": self.earlier}
        parts = [
            tables.table(title, columns, [c._cells(self.world_size) for c in contexts], optional=("bits",))
            for title, contexts in found.items()
        ]
        return Group(*parts)

    @property
    def remarks(self) -> list[str]:
        """The lines below the table."""
        lines = []
        if self.step is not None:
            lines.append(f"Tuned: {self.step}")
        lines += missing_gains(each for each in self.contexts if each.status not in ("cached", "tuning"))
        slower = labels_by_reason((each.label, each.not_fastest) for each in self.contexts)
        lines += [f"The winner is not the fastest of {labels}: {reason}." for labels, reason in slower]
        if any(context.launch_bound for context in self.contexts):
            lines.append(formatting.LAUNCH_BOUND_NOTE.capitalize())
        lines += [f"{context.label}: {context.untried}" for context in self.contexts if context.untried]
        lines += [line.capitalize() for line in cost_and_gain(self.cost, self.gain)]
        if self.outlook is not None:
            lines.append(f"Under way: {self.outlook}")
        lines += [f"{context.label}: {context.again}" for context in self.contexts if context.again]
        lines += self.operations
        if self.warning:
            lines.append(f"Warning: {self.warning}")
        return lines


class FunctionReports:
    """The report of a function's last session, with results and cost of the sessions before."""

    def __init__(self) -> None:
        self.last: TuningReport | None = None
        self._earlier: dict[str, TunedContext] = {}  # by label
        self._earlier_s = 0.0

    def keep(self, report: TuningReport, *, anew: bool) -> None:
        """Keep the report of a session that is over. anew: it took no result from before."""
        if (last := self.last) is not None:
            self._earlier.update(_settled_in(last))  # in place: there may be thousands
            self._earlier_s += last.cost_s
        if anew:
            self._earlier = {}
        self.last = report

    def completed(self, report: TuningReport | None, later: tuple[TunedContext, ...]) -> TuningReport | None:
        """Return a report with the results of earlier sessions, and `later` contexts. Any thread may."""
        if report is None:
            return None
        contexts, last = (*report.contexts, *later), self.last
        earlier, earlier_s = dict(self._earlier), self._earlier_s
        if last is not None and last is not report:
            earlier.update(_settled_in(last))
            earlier_s += last.cost_s
        now = {context.label for context in contexts}
        before = sorted((each for label, each in earlier.items() if label not in now), key=time_order)
        return replace(report, contexts=contexts, earlier=tuple(before), earlier_s=earlier_s)


def _settled_in(report: TuningReport) -> dict[str, TunedContext]:
    """Return the contexts of a session's report by label, but for those that it has dropped."""
    return {each.label: each for each in report.contexts if each.status != "unfinished"}


def missing_gains(contexts: Iterable[TunedContext]) -> Iterator[str]:
    """Yield a sentence for each reason why contexts have no gain; the time of a step leaves these out."""
    for labels, reason in labels_by_reason((each.label, each.no_gain_reason) for each in contexts):
        yield f"No gain of {labels}: {reason}."


def labels_by_reason(contexts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield each reason that is not empty, with the labels of its contexts before it."""
    labels: dict[str, list[str]] = {}
    for label, reason in contexts:
        if reason:
            labels.setdefault(reason, []).append(label)
    for reason, those in labels.items():
        more = f" and {len(those) - MOST_LABELS} more" if len(those) > MOST_LABELS else ""
        yield f"{', '.join(those[:MOST_LABELS])}{more}", reason


def step_times(contexts: Iterable[TunedContext]) -> StepTimes | None:
    """Return the time of one run without and with tuning; None where no context has both times."""
    of = {BY_RUN: _ComparedTimes(), BY_LAUNCH: _ComparedTimes()}
    for context in contexts:
        best_ms = context.ms
        if context.status == "tuning" and context.judge == BY_LAUNCH:  # known, though not launched yet
            best_ms = min(context.timings.values(), default=None)
        factor, sides = context.launches if context.judge == BY_LAUNCH else 1, of[context.judge]
        if best_ms is None or not context.default_ms:
            sides.left_out += 1
        elif factor:
            sides.before_ms.append(context.default_ms * factor)
            sides.after_ms.append(best_ms * factor)
    run, launches = of[BY_RUN], of[BY_LAUNCH]
    found = []
    if run.before_ms:  # the whole run holds the launches
        found.append(StepTimes(max(run.before_ms), min(run.after_ms), BY_RUN))
    if launches.before_ms:
        times = sum(launches.before_ms), sum(launches.after_ms)
        found.append(StepTimes(*times, BY_LAUNCH, launches.left_out))
    # A choice is compared with the kernels tuned: the time of its first option lacks what they have gained.
    return max(found, key=lambda step: step.gain_percent, default=None)


@dataclass
class _ComparedTimes:
    """The times of the contexts that are judged alike."""

    before_ms: list[float] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)
    left_out: int = 0


def time_order(context: TunedContext) -> tuple[float, str]:
    """Return the key that sorts the largest share of a run's launches first; the others last, by name."""
    return -(context.run_ms or 0.0), context.label


@dataclass(frozen=True)
class Findings:
    """The report of one function, loop or program, and its untuned keys."""

    report: TuningReport
    untuned: tuple[tuple[str, Any, str], ...] = ()  # kernel, key, reason

    @property
    def name(self) -> str:
        return self.report.function

    @property
    def contexts(self) -> tuple[TunedContext, ...]:
        return *self.report.contexts, *self.report.earlier


class Tuners:
    """The tuners that have made a call since `watch`, and the findings of those that are gone."""

    def __init__(self) -> None:
        self._is_watched = False
        self._alive: weakref.WeakSet[BaseTuner] = weakref.WeakSet()
        self._ended: list[Findings] = []

    def watch(self) -> None:
        self._is_watched = True

    def add(self, tuner: BaseTuner) -> None:
        if self._is_watched:
            self._alive.add(tuner)

    def leave(self, tuner: BaseTuner) -> None:
        """Keep the findings of a tuner that goes."""
        if self._is_watched:
            self._ended += findings_of(tuner)

    def findings(self) -> list[Findings]:
        found = [each for tuner in list(self._alive) for each in findings_of(tuner)]
        return [*self._ended, *found]


TUNERS = Tuners()


def findings_of(tuner: BaseTuner) -> Iterator[Findings]:
    """Yield a tuner's findings, if it has a report."""
    if (report := tuner.report) is not None:
        yield Findings(report, tuner.untuned)
