"""Plans of a tuned call: found by tuning, loaded from the results of a session, each ready to be timed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.common.launched import Held, Launched, Observer
from benchmarks.common.ranks import Ranks, Unsupported
from benchmarks.fresh_sessions.sessions import Found, Pick
from benchmarks.fresh_sessions.subjects import Alternative, Call, Callee, Subject
from dist_autotune import TunedContext, contextual_autotune

MODE = "DIST_AUTOTUNE_MODE"
CALLS = 3  # a session of the tuner may leave candidates for the next one


def tuned(
    callee: Callee, observer: Observer, name: str, directory: Path | None = None, **options: Any
) -> Pick:
    """Tune the call as a user's program does; return what it ended with.

    directory: of the results, and there are no logs; None: as the environment says.
    """
    where: dict[str, Any] = {} if directory is None else {"cache": directory, "log_dir": None}
    function = contextual_autotune(is_dist=True, watch=False, name=name, **where, **options)(callee.call)
    found: dict[str, Found] = {}
    runs, seconds = 0, 0.0
    for _ in range(CALLS):
        function()
        report = function.report
        assert report is not None
        runs, seconds = runs + report.runs, seconds + report.seconds
        for each in map(found_of, report.contexts):
            if each.status != "cached" or each.name not in found:  # what a session before this one has found
                found[each.name] = each
        if function.settled:
            break
    callee.check()
    launched = observer.launches_of(function)  # the first settled call, which prepares launches
    callee.check()
    return Pick(
        tuple(found.values()),
        tuple((each.kernel, each.config) for each in launched),
        runs,
        round(seconds, 2),
    )


def found_of(context: TunedContext) -> Found:
    is_config = isinstance(context.config, triton.Config)
    ms = context.ms if context.ms is not None and math.isfinite(context.ms) else None
    return Found(
        kernel=context.kernel,
        key=", ".join(map(str, context.key)),
        choice=str(context.config) if is_config else json.dumps(context.config),
        status=context.status,
        ms=ms,
        timings={text: ms for text, ms in context.timings.items() if math.isfinite(ms)},
    )


class Replay:
    """A call with the results of a directory: nothing is tried, in this process nor on disk.

    Called with MODE set to `cached`: the tuner asks at each call.
    """

    def __init__(self, callee: Callee, directory: Path, observer: Observer, name: str) -> None:
        self._callee, self._observer = callee, observer
        options: dict[str, Any] = {"is_dist": True, "watch": False, "cache": directory, "log_dir": None}
        self._function = contextual_autotune(**options, name=name)(callee.call)

    def load(self, pick: Pick) -> None:
        """Take the results from disk; raises Unsupported where they are not those of `pick`."""
        self._observer.clear()  # of kernels that two plans share, those of the other one
        for _ in range(CALLS):
            self._function()
            if self._function.settled:
                break
        self._callee.check()
        self.held = Held(self._observer.tuners)
        self.launched = self._observer.launches_of(self._function)
        self._callee.check()
        report = self._function.report
        assert report is not None
        loaded = [found_of(context) for context in report.contexts]
        kernels = {each.kernel for each in self.launched}
        self.choices = tuple(f"{each.kernel} {each.choice}" for each in loaded if each.kernel not in kernels)
        differences = difference(loaded, self.launched, pick)
        if differences:
            raise Unsupported(
                f"the cache of the session does not give back its pick: {'; '.join(differences)}"
            )

    def __call__(self) -> torch.Tensor:
        return self._function()

    def contender(self, name: str, choices: tuple[str, ...] = ()) -> Contender:
        """Return what is to be timed; `choices`: those that are fixed."""
        return Contender(name, self, self.launched, choices or self.choices, held=self.held)


def difference(loaded: Sequence[Found], launched: Sequence[Launched], pick: Pick) -> list[str]:
    """Return where what was loaded, and what it launches, is not what the session ended with."""
    ended = {found.name: found.choice for found in pick.found}
    differences = [
        f"{found.name} is {found.choice}, it was {ended.get(found.name, 'not tuned')}"
        for found in loaded
        if ended.get(found.name) != found.choice
    ]
    if tuple((each.kernel, each.config) for each in launched) != pick.launched:
        now, then = (", ".join(map(str, each)) or "nothing" for each in (launched, pick.launched))
        differences.append(f"it launches {now}, it launched {then}")
    return differences


@dataclass
class Contender:
    """A plan to be timed, and whose pick it is."""

    arm: str
    call: Call
    launched: tuple[Launched, ...]
    choices: tuple[str, ...] = ()  # of the host
    sessions: list[int] = field(default_factory=list)
    held: Held | None = None

    def has_plan_of(self, other: Contender) -> bool:
        """Return whether both launch the same with the same choices, of which what is fixed tells more."""
        few, many = sorted((set(self.choices), set(other.choices)), key=len)
        return self.launched == other.launched and few <= many

    def as_dict(self) -> dict[str, Any]:
        launched = [str(each) for each in self.launched]
        return {
            "arm": self.arm,
            "sessions": self.sessions,
            "choices": list(self.choices),
            "launched": launched,
        }


@dataclass
class Contest:
    """The plans of one shape, each once; what is wrong with picks, and which other plans are not there."""

    ranks: Ranks
    contenders: list[Contender] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, contender: Contender, session: int | None = None) -> None:
        """Take it in, unless there is one with its plan: that is then the pick of the session. Collective."""
        for known in self.contenders:
            if all(self.ranks.gather(contender.has_plan_of(known))):
                known.sessions += [session] if session else []
                return
        contender.sessions += [session] if session else []
        self.contenders.append(contender)

    def load(self, replay: Replay, pick: Pick, name: str, complaints: list[str]) -> bool:
        """Load the replay; return whether it is ready on all ranks, or else complain. Collective."""
        reason = self.ranks.attempt(lambda: replay.load(pick))
        if reason:
            complaints.append(f"{name} is not timed: {reason}")
        return not reason

    def most_picked(self) -> Contender | None:
        picked = [contender for contender in self.contenders if contender.sessions]
        return max(picked, key=lambda contender: len(contender.sessions), default=None)


@contextlib.contextmanager
def nothing_is_tried() -> Iterator[None]:
    before = os.environ.get(MODE)
    os.environ[MODE] = "cached"
    try:
        yield
    finally:
        del os.environ[MODE]
        if before is not None:
            os.environ[MODE] = before


def tuned_alternatives(
    subject: Subject, observer: Observer, contest: Contest, own: Path
) -> list[tuple[str, Callee, Pick | None]]:
    """Open each alternative, and tune alone what there is to tune; return what works."""
    found: list[tuple[str, Callee, Pick | None]] = []
    for name, alternative in subject.alternatives.items():

        def tune(name: str = name, alternative: Alternative = alternative) -> None:
            callee = alternative.open()
            observer.clear()  # or it would take what another one has found for the kernel they share
            pick = tuned(callee, observer, name, own / name) if alternative.has_kernel else None
            found.append((name, callee, pick))

        before, reason = len(found), contest.ranks.attempt(tune)
        if reason:
            del found[before:]
            contest.remarks.append(f"{name} is not timed: {reason}")
    return found


def best_configs(
    subject: Subject, picks: dict[int, Pick], contest: Contest, base: Contender, count: int
) -> list[Contender]:
    """Return the base with other configs of its kernels: of each, those that the sessions timed best."""
    if base.choices:
        contest.remarks.append(f"no configs besides the picks: a call also chooses {', '.join(base.choices)}")
        return []
    assert base.held is not None
    found = []
    for kernel in dict.fromkeys(each.kernel for each in base.launched):
        known = {each.config for other in contest.contenders for each in other.launched}
        for config in ranked_configs(kernel, picks):
            if config in known or len(found) == count:
                continue
            try:
                held = base.held.with_config(kernel, config)
            except ValueError:  # its text has a suffix, as that of another config is the same
                continue

            def call(held: Held = held) -> torch.Tensor:
                held.put_back()
                return subject.free.call()

            launched = tuple(
                sorted(Launched(kernel, config) if each.kernel == kernel else each for each in base.launched)
            )
            found.append(Contender(f"config {len(found) + 1}", call, launched))
    return found


def ranked_configs(kernel: str, picks: dict[int, Pick]) -> list[str]:
    """Return the configs of a kernel by what sessions timed, each relative to the session's best."""
    ratios: dict[str, list[float]] = {}
    for pick in picks.values():
        for found in pick.found:
            if found.kernel == kernel and found.timings:
                least = min(found.timings.values())
                for config, ms in found.timings.items():
                    ratios.setdefault(config, []).append(ms / least)
    # A session that dropped a config early has one poor sample of it: the median of all tells more.
    return sorted(ratios, key=lambda config: statistics.median(ratios[config]))


def void_what_launched_others(
    measured: dict[str, Any], timed: Sequence[Contender], observer: Observer, ranks: Ranks, trouble: list[str]
) -> None:
    """Take the time from each arm whose call now launches something else than its plan. Collective."""
    for row, contender in zip(measured["arms"], timed, strict=True):
        if "unavailable" in row:
            trouble.append(f"{contender.arm}: {row['unavailable']}")
            continue

        def look(contender: Contender = contender) -> None:
            seen = observer.launches_of(contender.call)
            if seen != contender.launched:
                now, plan = (", ".join(map(str, each)) or "nothing" for each in (seen, contender.launched))
                raise Unsupported(f"it launched {now}; its plan is {plan}")

        reason = ranks.attempt(look)
        if reason:
            row.clear()
            row.update(name=contender.arm, unavailable=reason)
            trouble.append(f"{contender.arm}: {reason}")
