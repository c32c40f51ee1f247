"""The report of a log directory as tables: on a terminal, into a pipe, and as one HTML page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType

from ..formatting import (
    BITS_NOTE,
    WALL_CLOCK,
    WALL_CLOCK_NOTE,
    bits_label,
    config_label,
    config_parts,
    counted,
    format_ms,
    format_percent,
    status_label,
)
from ..logs.records import SessionClosed
from ..search.rules import BY_LAUNCH, BY_RUN
from ..tables import stacked, table, text
from ..tuner.report import missing_gains, percent_over
from .contexts import CandidateHistory, ContextHistory, of_kind
from .history import History, SessionHistory

MOST_CANDIDATES = 10  # of a context
MOST_CONTEXTS = 10  # whose candidates are listed
SHOW_ALL = "The others: --all-candidates."
PAGE_WIDTH = 140  # columns of the HTML page
EXPLAINED = {  # columns of contexts
    ">share %": "share: of the time of all these launches in a step.",
    ">ms": "ms: of one launch, agreed over the ranks.",
    ">launches a step": "A step takes ms times launches.",
    ">gain %": "gain: over the first config.",
    ">spread %": "spread: slowest rank over fastest.",
    ">alone %": "alone: what the worst choice of one rank would have cost all.",
}


def history_parts(
    history: History, shown: Iterable[SessionHistory], *, all_candidates: bool = False
) -> Iterator[RenderableType]:
    """Yield the list of all sessions, then the `shown` ones; of candidates the fastest, or all."""
    most, most_contexts = (None, None) if all_candidates else (MOST_CANDIDATES, MOST_CONTEXTS)
    yield sessions_table(history.sessions)
    for name, reason in history.skipped.items():
        yield text(f"{history.directory / name}: {reason}", "yellow")
    for each in shown:
        yield text(f"\n{session_heading(each)}", "bold")
        yield text("\n".join([*each.report.remarks, session_place(each)]))
        yield from (text(note, "yellow") for note in session_notes(each))
        yield from (contexts_table(each), _time_table(each), _stragglers_table(each))
        for context in each.contexts[:most_contexts]:
            yield candidates_table(context, listed(context, most))
            if any(choice is not context.winner for choice, _ in ranks_by_choice(context)):
                yield _alone_table(context)
        if rest := each.contexts[most_contexts or len(each.contexts) :]:
            more = f"candidates of {counted(len(rest), 'more context')}"
            yield text(f"\nNot listed: {more}. --all-candidates lists all, --kernel NAME some.", "dim")


def write_html(path: Path, history: History, shown: Iterable[SessionHistory]) -> None:
    """Write the same tables, with all candidates, as one page that needs nothing beside it."""
    console = Console(record=True, width=PAGE_WIDTH, file=io.StringIO())
    console.print(*history_parts(history, shown, all_candidates=True), sep="\n")
    console.save_html(str(path))


def ranges(ranks: Sequence[int]) -> str:
    """Return sorted numbers as `0-3, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def sessions_table(sessions: Iterable[SessionHistory]) -> Group:
    """Return one row per session of the directory."""
    names = ("session", "started (UTC)", ">ranks", ">runs", ">contexts", "outcome", "function")
    rows = []
    for each in sessions:
        opened, closed = each.opened, each.closed
        started = opened.started_at[:16].replace("T", " ")
        counts = str(len(each.ranks)), str(closed.runs), str(len(each.contexts))
        rows.append((opened.session, started, *counts, closed.outcome, opened.thunk))
    return table("Sessions", names, rows)


def session_heading(session: SessionHistory) -> str:
    """Return one line with function, session, ranks, device, search and outcome."""
    opened = session.opened
    where = f"{counted(opened.world_size, 'rank')}, {opened.search}, {opened.mode}"
    ended = f"{counted(session.closed.runs, 'run')}, {session.closed.outcome}"
    return f"{opened.thunk}: session {opened.session}, {where}, {ended}"


def session_place(session: SessionHistory) -> str:
    """Return versions, device and hosts of a session."""
    opened = session.opened
    versions = ", ".join(f"{name} {version}" for name, version in opened.versions.items())
    hosts = f"{counted(len(session.hosts), 'host')}: {', '.join(session.hosts)}" if session.hosts else ""
    return "; ".join(filter(None, (opened.device, hosts, versions)))


def session_notes(session: SessionHistory) -> list[str]:
    """Return the reservations about the figures, then the remarks of the session."""
    notes = [WALL_CLOCK_NOTE] if session.opened.clock == WALL_CLOCK else []
    if missing := sorted({*session.opened.ranks} - {*session.ranks}):
        notes.append(f"No records of ranks {missing}: the figures leave them out.")
    return notes + session.remarks()


def contexts_table(session: SessionHistory) -> Group:
    """Return one row per context, the one that takes most of a run's time first."""
    report = session.report
    varies = any(context.launches > 1 for context in report.contexts)
    rows = []
    for context in session.contexts:
        tuned = context.tuned
        share = report.share_percent(tuned)
        is_alone = report.world_size == 1
        rows.append(
            (
                "-" if share is None else f"{share:.1f}",
                format_ms(tuned.ms),
                str(tuned.launches) if tuned.launches > 0 and tuned.judge == BY_LAUNCH and varies else "-",
                format_percent(tuned.gain_percent),
                format_percent(None if is_alone else tuned.spread_percent),
                format_percent(None if is_alone else context.cost_alone_percent),
                status_label(tuned.status, launch_bound=tuned.launch_bound),
                bits_label(tuned.same_bits),
                stacked(tuned.label, config_label(tuned.config or "-")),
            )
        )
    notes = []
    if any(context.judge == BY_RUN for context in report.contexts):
        notes.append("Without a share: judged by the time of the whole run, which is its ms.")
    notes += missing_gains(context for context in report.contexts if context.status == "cached")
    return table(
        "Contexts",
        [*EXPLAINED, "status", "bits", "context and winner"],
        rows,
        " ".join(notes),
        optional=(">launches a step", ">spread %", ">alone %", "bits"),
        explained={**EXPLAINED, "bits": BITS_NOTE},
    )


def _time_table(session: SessionHistory) -> Group:
    names = ("rank", ">seconds", ">runs", ">compiling", ">exchanges", ">rest")
    rows = []
    for closed in of_kind(session.records, SessionClosed):
        spent = closed.runs_s, closed.compiling_s, closed.exchanges_s
        if any(spent):
            seconds = closed.seconds, *spent, closed.seconds - sum(spent)
            rows.append((str(closed.rank), *(f"{each:.1f}" for each in seconds)))
    return table("Where the time went", names, rows, "The rest: the tuner's own, and between calls.")


def _stragglers_table(session: SessionHistory) -> Group:
    names = ("rank", ">slowest in", ">of samples", ">median behind fastest %")
    rows = tuple(
        (str(s.rank), str(s.slowest_samples), str(s.compared_samples), format_percent(s.behind_percent))
        for s in session.stragglers()
    )
    return table("Stragglers", names, rows, "Samples that at least two ranks took in the same run.")


def shared_parts(context: ContextHistory) -> tuple[str, ...]:
    """Return the parts of a config that all candidates of a context share."""
    parts = [config_parts(each.config) for each in context.candidates]
    if len(parts) < 2:
        return ()
    return tuple(part for part in parts[0] if all(part in other for other in parts))


def short_config(candidate: CandidateHistory, shared: Sequence[str]) -> str:
    """Return a candidate's config without the fields that all candidates share."""
    own = [part for part in config_parts(candidate.config) if part not in shared]
    return ", ".join(own) or config_label(candidate.config)


def in_order(candidates: Iterable[CandidateHistory]) -> list[CandidateHistory]:
    """Return the fastest candidate first, those without a time last."""
    return sorted(candidates, key=lambda each: (each.agreed_ms is None, each.agreed_ms or 0.0))


def listed(context: ContextHistory, most: int | None) -> list[CandidateHistory]:
    """Return the candidates, the fastest first: all, or so many and the winner."""
    ordered = in_order(context.candidates)
    if most is None or len(ordered) <= most:
        return ordered
    winner = [each for each in ordered[most:] if each is context.winner]
    return [*ordered[:most], *winner]


def candidates_table(context: ContextHistory, shown: Sequence[CandidateHistory]) -> Group:
    """Return one row for each of the candidates `shown`."""
    names = (
        ">id", ">ms", ">over best %", ">spread %", ">slowest rank", ">samples", "config", "remark",
    )  # fmt: skip
    ordered, shared = in_order(context.candidates), shared_parts(context)
    rows = []
    for each in shown:
        over_best = percent_over(each.agreed_ms, ordered[0].agreed_ms)
        slowest = "-" if each.spread_percent is None else str(max(each.rank_ms, key=each.rank_ms.__getitem__))
        figures = format_ms(each.agreed_ms), format_percent(over_best), format_percent(each.spread_percent)
        winner = "winner" if each is context.winner else ""
        remark = f"banned on all ranks by {each.banned}" if each.banned else winner
        texts = short_config(each, shared), remark
        rows.append((str(each.config_id), *figures, slowest, str(each.samples), *texts))
    title, note = f"{context.tuned.label}: candidates", _candidates_note(context)
    if len(shown) < len(ordered):
        title, note = f"{title}{_counts(context, len(shown))}", f"{note} {SHOW_ALL}".lstrip()
    return table(title, names, rows, note, optional=(">spread %", ">slowest rank"))


def _counts(context: ContextHistory, shown: int) -> str:
    """Return the numbers of candidates shown, timed, banned and not tried."""
    count, timed = len(context.candidates), sum(each.agreed_ms is not None for each in context.candidates)
    banned = sum(bool(each.banned) for each in context.candidates)
    fates = {"timed": timed, "banned": banned, "not tried": max(count - timed - banned, 0)}
    said = ", ".join(f"{number} {fate}" for fate, number in fates.items() if number and number < count)
    return f", {shown} of {count}" + (f" ({said})" if said else "")


def _candidates_note(context: ContextHistory) -> str:
    """Return the note below the candidates: shared fields, and the choice of each rank alone."""
    shared = shared_parts(context)
    notes = [f"All: {', '.join(shared)}."] if shared else []
    if [choice for choice, _ in ranks_by_choice(context)] == [context.winner]:
        notes.append("Each rank alone would choose the winner.")
    return " ".join(notes)


def ranks_by_choice(context: ContextHistory) -> list[tuple[CandidateHistory, list[int]]]:
    """Return each candidate that ranks alone would choose, with those ranks; empty for a single rank."""
    if not any(candidate.spread_percent is not None for candidate in context.candidates):
        return []
    ranks: dict[int, list[int]] = {}
    choices = context.choices_alone()
    for rank, choice in choices.items():
        ranks.setdefault(choice.config_id, []).append(rank)
    return [(choices[own[0]], own) for own in ranks.values()]


def _alone_table(context: ContextHistory) -> Group:
    names = ("ranks", ">id", ">own ms", ">agreed ms", ">cost %", "config they alone would choose")
    shared = shared_parts(context)
    rows = []
    for choice, ranks in ranks_by_choice(context):
        own = sorted(choice.rank_ms[rank] for rank in ranks)
        own_ms = "-".join(dict.fromkeys((format_ms(own[0]), format_ms(own[-1]))))
        cost = format_percent(percent_over(choice.agreed_ms, context.tuned.ms))
        figures = str(choice.config_id), own_ms, format_ms(choice.agreed_ms), cost
        rows.append((ranges(ranks), *figures, short_config(choice, shared)))
    return table(f"{context.tuned.label}: each rank alone", names, rows)
