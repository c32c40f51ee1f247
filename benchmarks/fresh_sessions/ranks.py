"""What the ranks do: a session tunes and leaves its picks; the timing times all of them."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.arms import Plan, measure
from benchmarks.common.launched import Observer, autotuners
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit
from benchmarks.common.records import INTERPRETER_NOTE, clocks_seen, describe_run, write_json
from benchmarks.common.render import summary
from benchmarks.fresh_sessions.plans import (
    Contender,
    Contest,
    Replay,
    best_configs,
    nothing_is_tried,
    tuned,
    tuned_alternatives,
    void_what_launched_others,
)
from benchmarks.fresh_sessions.sessions import Pick, Sessions
from benchmarks.fresh_sessions.subjects import OPERATIONS, Subject
from benchmarks.fresh_sessions.table import Regret, arms_table, table
from benchmarks.operations.harness import PATIENCE_S
from dist_autotune.kernels.symm import open_symmetric_memory

OWN_SHARE = 0.8  # of a session's limit, for what its ranks do when they have been started


def shapes_of(options: argparse.Namespace) -> list[Any]:
    """Return the shapes to tune; raises SystemExit for what is none."""
    operation = OPERATIONS[options.op]
    make, public, default = operation.shape, operation.public, operation.default
    if options.shapes in ("default", "public"):
        if options.shapes == "public" and not ON_GPU:
            raise SystemExit("--shapes public needs GPUs: the interpreter would take days")
        return list(public) if options.shapes == "public" else [default]
    try:
        return [make(*map(int, text.split("x"))) for text in options.shapes.split(",")]
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--shapes {options.shapes}: {error}; such as {default}") from None


# ---- a session


def run_session(options: argparse.Namespace) -> None:
    """Be a rank of a session: tune all shapes in turn."""
    number, sessions, shapes = int(options.session), Sessions(options.directory), shapes_of(options)
    first = (number - 1) % len(shapes)
    shapes = shapes[first:] + shapes[:first]

    def body(ranks: Ranks) -> int:
        picks: dict[str, Pick] = {}
        trouble = []
        # Before the process that started this one ends it: a rank that hangs says where.
        with time_limit(OWN_SHARE * options.session_limit_s), _memory(options, ranks):
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


@contextlib.contextmanager
def _memory(options: argparse.Namespace, ranks: Ranks) -> Iterator[None]:
    """Keep symmetric memory open for the block, so that NVSHMEM is set up once."""
    with open_symmetric_memory(None, options.backend, ranks.device, timeout_s=PATIENCE_S) as memory:
        options.backend = memory.name
        yield


# ---- timing


def time_operation(shape: Any, options: argparse.Namespace, ranks: Ranks, own: Path) -> dict[str, Any]:
    """Time the picks of one shape and their alternatives; return the record. `own`: a new directory."""
    sessions = Sessions(options.directory)
    picks = sessions.picks(str(shape), options.sessions)
    with time_limit(options.shape_limit_s):
        subject = OPERATIONS[options.op].open(shape, options, ranks)
        subject.refresh()
        ranks.synchronize()
        observer, contest = Observer(autotuners()), Contest(ranks)
        gather_plans(subject, picks, sessions, observer, contest, own)
        base = contest.most_picked()
        if not subject.has_choices and base is not None:
            contest.contenders += best_configs(subject, picks, contest, base, options.configs)
    again = [] if base is None else [replace(base, arm=f"{base.arm} again")]
    timed = [*contest.contenders, *again]
    arms = [subject.arm(each.arm, lambda each=each: each.call) for each in timed]
    with nothing_is_tried():
        measured = measure(arms, ranks, subject.refresh, plan_of(options))
        void_what_launched_others(measured, timed, observer, ranks, contest.trouble)
    return {
        **measured,
        **answers(measured, contest, base),
        "plans": [each.as_dict() for each in contest.contenders],
        "tuning": {str(n): {"runs": each.runs, "seconds": each.seconds} for n, each in picks.items()},
        "trouble": contest.trouble,
        "remarks": contest.remarks,
        "clocks": clocks_seen(ranks),
        "trouble_at_closing": [text for each in subject.operations if (text := ranks.attempt(each.close))],
    }


def gather_plans(
    subject: Subject,
    picks: dict[int, Pick],
    sessions: Sessions,
    observer: Observer,
    contest: Contest,
    own: Path,
) -> None:
    """Tune the alternatives, then load all picks and them, from directories of their own."""
    alternatives = tuned_alternatives(subject, observer, contest, own)
    with nothing_is_tried():
        for number, pick in picks.items():
            replay = Replay(subject.free, sessions.cache(number), observer, f"session {number}")
            if contest.load(replay, pick, f"session {number}", contest.trouble):
                contest.add(replay.contender(f"pick {chr(ord('A') + len(contest.contenders))}"), number)
        for name, callee, pick in alternatives:
            choices = subject.alternatives[name].choices
            if pick is None:
                contest.add(Contender(name, callee.call, (), choices))
                continue
            replay = Replay(callee, own / name, observer, name)
            if contest.load(replay, pick, name, contest.remarks):
                contest.add(replay.contender(name, choices))


def answers(measured: dict[str, Any], contest: Contest, base: Contender | None) -> dict[str, Any]:
    """Return the regret of all sessions, and by how much two arms of the base differ."""
    ms = {arm["name"]: arm["ms"] for arm in measured["arms"] if "unavailable" not in arm}
    # A second chance of one plan is no arm of its own: the least of both would be too low.
    again_ms = ms.pop(f"{base.arm} again", None) if base is not None else None
    noise = None
    if base is not None and again_ms is not None and base.arm in ms:
        noise = 100 * abs(again_ms / ms[base.arm] - 1)
    of_sessions = {number: each.arm for each in contest.contenders for number in each.sessions}
    return {
        "regrets": {"": Regret.of(ms, of_sessions).as_dict()} if ms else {},
        "noise_percent": noise,
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
        record = new_record(options, ranks)
        ended = [each for each in sessions.ended() if each.session <= options.sessions]
        record["sessions"] = [{**vars(each)} for each in ended]
        record["cases"] = cases = []
        own = options.directory / "timing" / f"results-{ranks.gather(os.getpid())[0]}"
        with _memory(options, ranks):
            for shape in shapes:
                case = time_operation(shape, options, ranks, own / str(len(cases)))
                case["trouble"] += missing_picks(case, [each.session for each in ended])
                cases.append({"case": str(shape), "dtype": options.dtype, **case})
                make_tables(record, options.sessions)
                ranks.say(progress_line(cases[-1]))
                if options.json is not None and ranks.rank == 0:
                    write_json(options.json, record)
        ranks.say(f"\n{summary(record)}")
        trouble = [text for case in cases for text in case["trouble"] + case["trouble_at_closing"]]
        return int(bool(trouble) or any(each.trouble for each in ended))

    run_on_ranks(body)


def new_record(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    operation = OPERATIONS[options.op]
    record = describe_run(
        ranks,
        op=f"regret_{options.op}",
        title=f"{operation.title}: regret of {options.sessions} sessions",
        commit=options.commit,
        plan=plan_of(options),
    )
    record["command"] = options.ran_as
    record["case_title"] = operation.case_title
    return record


def make_tables(record: dict[str, Any], sessions: int) -> None:
    """Make the tables of all cases there are."""
    cases, failed = record["cases"], [each for each in record["sessions"] if each["trouble"]]
    record["table"] = table(cases, record["case_title"], range(1, sessions + 1))
    record["more_tables"] = [arms_table(cases, record["case_title"])]
    record["table"]["notes"] += [
        f"Medians of {record['iterations']} calls on each rank, then the slowest rank.",
        *(f"session {each['session']}: {each['trouble']}" for each in failed),
        *([] if ON_GPU else [INTERPRETER_NOTE]),
    ]


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
