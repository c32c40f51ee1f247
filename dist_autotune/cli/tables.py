"""The report of a log directory as plain tables; the terminal and the HTML file show the same ones."""

from __future__ import annotations

from collections.abc import Iterable

from ..formatting import LAUNCH_BOUND_NOTE, WALL_CLOCK_NOTE, Table, counted, format_ms, one_line, status_label
from ..logs.history import ContextHistory, SessionHistory, of_kind, percent_over
from ..logs.records import Preflighted


def format_percent(percent: float | None) -> str:
    """Return `percent` with its sign and one decimal; `-` for None."""
    return "-" if percent is None else f"{percent:+.1f}"


def sessions_table(sessions: Iterable[SessionHistory]) -> Table:
    """Return one row per session of the directory."""
    names = ("session", "function", "started (UTC)", "search", ">ranks", ">runs", ">contexts", "outcome")
    rows = []
    for each in sessions:
        opened, closed = each.opened, each.closed
        search = f"{opened.search}, {opened.mode}"
        counts = str(len(each.ranks)), str(closed.runs), str(len(each.contexts))
        rows.append((opened.session, opened.thunk, opened.started_at, search, *counts, closed.outcome))
    return Table("Sessions", names, rows)


def session_heading(session: SessionHistory) -> str:
    """Return one line that says what was tuned, where and how."""
    opened = session.opened
    where = f"{counted(opened.world_size, 'rank')}, {opened.device}"
    ended = f"{counted(session.closed.runs, 'run')}, {session.closed.outcome}"
    return f"{opened.thunk}: session {opened.session}, {where}, {ended}"


def session_notes(session: SessionHistory) -> list[str]:
    """Return what a reader must know before the figures, then what the session remarked."""
    notes = [WALL_CLOCK_NOTE] if session.is_wall_clock else []
    if missing := session.missing_ranks:
        notes.append(f"No records of ranks {missing}: the figures leave them out.")
    if session.closed.warning:
        notes.append(f"Warning: {session.closed.warning}")
    return notes + session.remarks()


def session_tables(session: SessionHistory) -> list[Table]:
    """Return the tables about a session as a whole: its contexts, then its ranks."""
    return [_contexts_table(session), _stragglers_table(session), _compiling_table(session)]


def context_tables(context: ContextHistory) -> list[Table]:
    """Return the tables about one context: its candidates, and what each rank alone would choose."""
    has_spread = any(candidate.spread_percent is not None for candidate in context.candidates)
    return [_candidates_table(context), *([_alone_table(context)] if has_spread else [])]


def _contexts_table(session: SessionHistory) -> Table:
    names = ("context", "winner", ">ms", "status", ">timed", ">banned", ">spread %", ">cost alone %")
    rows = []
    for context in session.contexts:
        winner, settled = context.winner, context.settled
        costs = [percent_over(choice.agreed_ms, settled.ms) for choice in context.choices_alone().values()]
        worst = max((cost for cost in costs if cost is not None), default=None)
        timed = sum(candidate.agreed_ms is not None for candidate in context.candidates)
        banned = sum(bool(candidate.banned) for candidate in context.candidates)
        found = (winner.config if winner else "-", format_ms(settled.ms))
        status = status_label(settled.status, launch_bound=settled.launch_bound)
        spread = format_percent(winner.spread_percent if winner else None)
        cost = format_percent(worst if len(session.ranks) > 1 else None)
        rows.append((context.label, *found, status, str(timed), str(banned), spread, cost))
    note = (
        "ms: agreed over the ranks. spread: slowest rank over fastest, of the winner. "
        "cost alone: what the worst choice of a single rank would have cost all of them."
    )
    if any(context.settled.launch_bound for context in session.contexts):
        note += f" {LAUNCH_BOUND_NOTE}"
    return Table("Contexts", names, rows, note)


def _stragglers_table(session: SessionHistory) -> Table:
    names = ("rank", ">slowest in", ">of samples", ">median behind fastest %")
    rows = tuple(
        (str(s.rank), str(s.slowest_samples), str(s.compared_samples), format_percent(s.behind_percent))
        for s in session.stragglers()
    )
    return Table("Stragglers", names, rows, "Samples that at least two ranks took in the same run.")


def _compiling_table(session: SessionHistory) -> Table:
    names = ("rank", ">compiled here", ">by peers", ">in the cache", ">failed", ">seconds")
    records = of_kind(session.records, Preflighted)
    rows = []
    for rank in sorted({record.rank for record in records}):
        own = [(r.compiled, r.from_peers, r.cached, r.failed, r.seconds) for r in records if r.rank == rank]
        *counts, seconds = map(sum, zip(*own, strict=True))
        rows.append((str(rank), *map(str, counts), f"{seconds:.1f}"))
    note = "Candidates compiled and loaded before trials. By peers: by another process of the same host."
    return Table("Compiling", names, rows, note)


def _candidates_table(context: ContextHistory) -> Table:
    names = (
        ">id", "config", ">agreed ms", ">over best %", ">fastest (rank)", ">slowest (rank)",
        ">spread %", ">samples", "remark",
    )  # fmt: skip
    in_order = sorted(context.candidates, key=lambda each: (each.agreed_ms is None, each.agreed_ms or 0.0))
    rows = []
    for each in in_order:
        over_best = percent_over(each.agreed_ms, in_order[0].agreed_ms)
        agreed, extremes = (format_ms(each.agreed_ms), format_percent(over_best)), ["-", "-"]
        if each.spread_percent is not None:
            times = sorted((ms, rank) for rank, ms in each.rank_ms.items())
            extremes = [f"{format_ms(ms)} ({rank})" for ms, rank in (times[0], times[-1])]
        counts = format_percent(each.spread_percent), str(each.samples)
        winner = "winner" if each is context.winner else ""
        remark = f"banned on all ranks by {one_line(each.banned)}" if each.banned else winner
        rows.append((str(each.config_id), each.config, *agreed, *extremes, *counts, remark))
    return Table(f"{context.label}: candidates", names, rows, _convergence(context))


def _convergence(context: ContextHistory) -> str:
    """Return when the search first knew a time, and when it first knew its best one."""
    best_ms = context.convergence
    if not best_ms:
        return ""
    first, best, last = min(best_ms), min(best_ms, key=lambda run: best_ms[run]), max(best_ms)
    known = f"Best agreed time: {format_ms(best_ms[first])} ms after run {first}"
    return f"{known}, {format_ms(best_ms[best])} ms after run {best}; last trial in run {last}."


def _alone_table(context: ContextHistory) -> Table:
    names = ("rank", ">id", "config it alone would choose", ">own ms", ">agreed ms", ">cost %")
    rows = []
    for rank, choice in context.choices_alone().items():
        cost = format_percent(percent_over(choice.agreed_ms, context.settled.ms))
        times = format_ms(choice.rank_ms[rank]), format_ms(choice.agreed_ms)
        rows.append((str(rank), str(choice.config_id), choice.config, *times, cost))
    return Table(f"{context.label}: each rank alone", names, rows)
