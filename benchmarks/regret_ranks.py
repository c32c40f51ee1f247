"""What the ranks of `regret.py` do: a session tunes and leaves its picks; the timing times all of them."""

from __future__ import annotations

import argparse
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

import overlap
from common import (
    INTERPRETER_NOTE,
    ON_GPU,
    Plan,
    Ranks,
    Unsupported,
    clocks_seen,
    describe_run,
    measure,
    run_on_ranks,
    time_limit,
    write_json,
)
from dist_autotune import TunedContext, contextual_autotune
from dist_autotune.kernels.symm import open_symmetric_memory
from launched import Held, Launched, Observer, autotuners
from operations import PATIENCE_S
from regret_sessions import Found, Pick, Sessions
from regret_subjects import OPERATIONS, Alternative, Call, Callee, Subject
from regret_table import Regret, arms_table, table
from render import summary

MODE = "DIST_AUTOTUNE_MODE"
CALLS = 3  # a session of the tuner may leave candidates for the next one


def shapes_of(options: argparse.Namespace) -> list[Any]:
    """Return the shapes to tune; raises SystemExit for what is none."""
    if options.op == "overlap":
        make, public, default = overlap.Case, overlap.PUBLISHED, overlap.DEFAULT
    else:
        operation = OPERATIONS[options.op]
        make, public, default = operation.shape, operation.public, operation.default
    if options.shapes in ("default", "public"):
        if options.shapes == "public" and not ON_GPU:
            raise SystemExit("--shapes public needs GPUs: the interpreter would take days")
        return list(public) if options.shapes == "public" else [default]
    try:
        return [make(*map(_number, text.split("x"))) for text in options.shapes.split(",")]
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--shapes {options.shapes}: {error}; such as {default}") from None


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


# ---- tuning


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
    launched = observer.launches_anew(function)
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


def run_session(options: argparse.Namespace) -> None:
    """Be a rank of a session: tune all shapes in turn."""
    number, sessions, shapes = int(options.session), Sessions(options.directory), shapes_of(options)
    first = (number - 1) % len(shapes)
    shapes = shapes[first:] + shapes[:first]

    def body(ranks: Ranks) -> int:
        picks: dict[str, Pick] = {}
        trouble = []
        with time_limit(options.session_limit_s), _memory(options, ranks):
            for shape in shapes:
                found: dict[str, Pick] = {}

                def tune(shape: Any = shape, found: dict[str, Pick] = found) -> None:
                    found |= picks_of(shape, options, ranks)

                reason = ranks.attempt(tune)
                if reason:
                    trouble.append(reason)
                    ranks.say(f"Error at {shape}: {reason}")
                    continue
                picks |= found
                if ranks.rank == 0:
                    sessions.write_picks(number, picks)
        return int(bool(trouble))

    run_on_ranks(body)


def picks_of(shape: Any, options: argparse.Namespace, ranks: Ranks) -> dict[str, Pick]:
    """Tune one shape, and check what it then computes; return the picks by name."""
    if options.op == "overlap":
        return _picks_of_overlap(shape, ranks)
    subject = OPERATIONS[options.op].open(shape, options, ranks)
    subject.refresh()
    ranks.synchronize()
    pick = tuned(subject.free, Observer(autotuners()), f"regret: {options.op}")
    arm = subject.arm("tuned", lambda: subject.free.call)
    error = arm.error(subject.free.call())
    if not error <= arm.limit:
        raise RuntimeError(f"wrong result: relative error {error:.1e}, at most {arm.limit:.1e} is explained")
    for each in subject.operations:
        each.close()
    return {str(shape): pick}


def _picks_of_overlap(case: overlap.Case, ranks: Ranks) -> dict[str, Pick]:
    example = overlap.load_example()
    step = example.Step(case.m, case.n, case.k, case.mib, ranks.device)
    reports = dict(zip(overlap.PICKS, example.tuned_three_ways(step).values(), strict=True))
    picks = {}
    for name, report in reports.items():
        found = tuple(map(found_of, report.contexts))
        launched = tuple((each.kernel, each.choice) for each in found)
        picks[f"{case}: {name}"] = Pick(found, launched, report.runs, round(report.seconds, 2))
    return picks


@contextlib.contextmanager
def _memory(options: argparse.Namespace, ranks: Ranks) -> Iterator[None]:
    """Keep symmetric memory open for the block, so that NVSHMEM is set up once."""
    if options.op == "overlap":
        yield
        return
    with open_symmetric_memory(None, options.backend, ranks.device, timeout_s=PATIENCE_S) as memory:
        options.backend = memory.name
        yield


# ---- timing


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
        self.launched = self._observer.launches_anew(self._function)
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
        self.held.put_back()
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


def time_operation(shape: Any, options: argparse.Namespace, ranks: Ranks, own: Path) -> dict[str, Any]:
    """Time the picks of one shape and their alternatives; return the record. `own`: a new directory."""
    sessions = Sessions(options.directory)
    picks = sessions.picks(str(shape), options.sessions)
    with time_limit(options.shape_limit_s):
        subject = OPERATIONS[options.op].open(shape, options, ranks)
        subject.refresh()
        ranks.synchronize()
        observer, contest = Observer(autotuners()), Contest(ranks)
        fixed = tuned_alternatives(subject, observer, contest, own)
        with nothing_is_tried():
            for number, pick in picks.items():
                replay = Replay(subject.free, sessions.cache(number), observer, f"session {number}")
                if contest.load(replay, pick, f"session {number}", contest.trouble):
                    contest.add(replay.contender(f"pick {chr(ord('A') + len(contest.contenders))}"), number)
            for name, callee, pick in fixed:
                choices = subject.fixed[name].choices
                if pick is None:
                    contest.add(Contender(name, callee.call, (), choices))
                    continue
                replay = Replay(callee, own / name, observer, name)
                if contest.load(replay, pick, name, contest.remarks):
                    contest.add(replay.contender(name, choices))
        base = contest.most_picked()
        if not subject.fixed and base is not None:
            contest.contenders += best_configs(subject, picks, contest, base, options.configs)
    again = base and Contender(f"{base.arm} again", base.call, base.launched, base.choices)
    timed = [*contest.contenders, *([again] if again else [])]
    arms = [subject.arm(each.arm, lambda each=each: each.call) for each in timed]
    with nothing_is_tried():
        measured = measure(arms, ranks, subject.refresh, plan_of(options))
        void_what_launched_others(measured, timed, observer, ranks, contest.trouble)
    ms = {arm["name"]: arm["ms"] for arm in measured["arms"] if "unavailable" not in arm}
    noise = None
    if base is not None and again is not None and {base.arm, again.arm} <= ms.keys():
        noise = 100 * abs(ms[again.arm] / ms[base.arm] - 1)
    ms.pop(again.arm if again else "", None)  # a second chance of one plan: its least would be too low
    of_sessions = {number: each.arm for each in contest.contenders for number in each.sessions}
    clocks = clocks_seen(ranks)
    return {
        **measured,
        "regrets": {"": Regret.of(ms, of_sessions).as_dict()} if ms else {},
        "noise_percent": noise,
        "plans": [each.as_dict() for each in contest.contenders],
        "trouble": contest.trouble,
        "remarks": contest.remarks,
        "clocks": clocks,
        "trouble_at_closing": [text for each in subject.operations if (text := ranks.attempt(each.close))],
    }


def tuned_alternatives(
    subject: Subject, observer: Observer, contest: Contest, own: Path
) -> list[tuple[str, Callee, Pick | None]]:
    """Open each alternative that arguments fix, and tune alone what there is to tune; return what works."""
    found: list[tuple[str, Callee, Pick | None]] = []
    for name, alternative in subject.fixed.items():

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


def time_overlap(case: overlap.Case, options: argparse.Namespace, ranks: Ranks, own: Path) -> dict[str, Any]:
    """Time every config of the example, in the step and alone; return the record."""
    example = overlap.load_example()
    step = example.Step(case.m, case.n, case.k, case.mib, ranks.device)
    configs = {example.label(config): config for config in example.persistent_gemm.configs}
    observer, trouble = Observer([example.persistent_gemm]), []

    def refresh() -> None:
        for tensor in (step.a, step.b, step.bucket):
            tensor.normal_()

    arms = overlap.arms_of(step, configs)
    timed = [
        Contender(arm.name, arm.prepare(), (Launched("persistent_gemm", str(config)),))
        for arm, config in zip(arms, [*configs.values(), *configs.values()], strict=False)
    ]
    measured = measure(arms, ranks, refresh, plan_of(options))
    rest = measured["arms"][len(timed) :]  # without a kernel of ours
    ours = {**measured, "arms": measured["arms"][: len(timed)]}
    void_what_launched_others(ours, timed, observer, ranks, trouble)
    ms = {arm["name"]: arm["ms"] for arm in ours["arms"] if "unavailable" not in arm}
    sessions, of_config = Sessions(options.directory), {str(c): label for label, c in configs.items()}
    regrets = {}
    questions = {
        "step, tuned by run time": ("run", "step"),
        "GEMM alone, tuned alone": ("alone", "GEMM"),
        "step, tuned by the GEMM's time in it": ("kernel", "step"),
        "step, tuned alone": ("alone", "step"),
    }
    for question, (name, where) in questions.items():
        picks = sessions.picks(f"{case}: {name}", options.sessions)
        of_sessions = {n: f"{of_config[pick.launched[0][1]]}, {where}" for n, pick in picks.items()}
        of_question = {arm: time for arm, time in ms.items() if arm.endswith(f", {where}")}
        if of_question:
            regrets[question] = Regret.of(of_question, of_sessions).as_dict()
        for number, arm in of_sessions.items():
            picker = next(each for each in timed if each.arm == arm)
            picker.sessions += [] if number in picker.sessions else [number]
    return {
        **ours,
        "arms": [*ours["arms"], *rest],
        "regrets": regrets,
        "noise_percent": None,
        "plans": [each.as_dict() for each in timed],
        "trouble": trouble,
        "remarks": [],
        "clocks": clocks_seen(ranks),
        "trouble_at_closing": [],
    }


# ---- the record


def plan_of(options: argparse.Namespace) -> Plan:
    """Return how often each arm is called; more often than in other benchmarks, as near ties are compared."""
    warm_ups, iterations = (120, 60) if ON_GPU else (4, 3)
    return Plan(
        warm_ups=warm_ups if options.warm_ups is None else options.warm_ups,
        iterations=iterations if options.iterations is None else options.iterations,
        limit_s=options.shape_limit_s,
    )


def run_timing(options: argparse.Namespace) -> None:
    """Be a rank of the timing: time all shapes, write the record after each, show the table."""
    shapes, sessions = shapes_of(options), Sessions(options.directory)

    def body(ranks: Ranks) -> int:
        is_overlap = options.op == "overlap"
        title = "A GEMM beside an all-reduce" if is_overlap else OPERATIONS[options.op].title
        case_title = "M x N x K, all-reduce" if is_overlap else OPERATIONS[options.op].case_title
        record = describe_run(
            ranks,
            op=f"regret_{options.op}",
            title=f"{title}: regret of {options.sessions} sessions",
            commit=options.commit,
            plan=plan_of(options),
        )
        record["command"] = options.ran_as
        ended = [each for each in sessions.ended() if each.session <= options.sessions]
        record["sessions"] = [{**vars(each)} for each in ended]
        record["cases"] = cases = []
        own = options.directory / "timing" / f"results-{ranks.gather(os.getpid())[0]}"
        failed = [f"session {each.session}: {each.trouble}" for each in ended if each.trouble]
        with _memory(options, ranks):
            for shape in shapes:
                timing = time_overlap if is_overlap else time_operation
                case = timing(shape, options, ranks, own / str(len(cases)))
                missing = missing_picks(case, [each.session for each in ended])
                cases.append({"case": str(shape), "dtype": options.dtype, **case})
                cases[-1]["trouble"] += missing
                numbers = list(range(1, options.sessions + 1))
                record["table"] = table(cases, case_title, numbers)
                record["table"]["notes"] += failed if ON_GPU else [*failed, INTERPRETER_NOTE]
                record["more_tables"] = [arms_table(cases, case_title)]
                ranks.say(progress_line(cases[-1]))
                if options.json is not None and ranks.rank == 0:
                    write_json(options.json, record)
        ranks.say(f"\n{summary(record)}")
        trouble = [text for case in cases for text in case["trouble"] + case["trouble_at_closing"]]
        return int(bool(trouble or failed))

    run_on_ranks(body)


def missing_picks(case: dict[str, Any], sessions: Sequence[int]) -> list[str]:
    """Return a line for each question that sessions have no timed pick for."""
    lines = []
    for question, regret in case["regrets"].items():
        missing = [str(number) for number in sessions if str(number) not in regret["percent"]]
        if missing:
            lines.append(f"no time of the pick of sessions {', '.join(missing)} {question}".rstrip())
    return lines


def progress_line(case: dict[str, Any]) -> str:
    parts = [
        f"{question or 'best'}: {regret['best']} {regret['best_ms']:.4f} ms, regret in percent "
        + " ".join(f"{percent:.2f}" for percent in regret["percent"].values())
        for question, regret in case["regrets"].items()
    ]
    return f"{case['case']}: {'; '.join(parts) or 'nothing could be timed'}"
