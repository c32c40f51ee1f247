"""The report of a log directory as one HTML page that needs nothing beside it; its style is `report.css`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ..formatting import (
    Table,
    bits_label,
    config_label,
    counted,
    format_ms,
    format_percent,
    one_line,
    status_label,
)
from ..logs.records import SessionClosed
from ..regular_files import require_directory_of
from ..search.budget import StepTimes
from ..search.rules import BY_LAUNCH
from ..tuner.report import TunedContext
from . import tables
from .history import CandidateHistory, ContextHistory, History, is_time, of_kind, percent_over
from .report import SessionReport, cost_alone_percent

MOST_OPEN = 3  # contexts, and sessions, that are shown unfolded
MOST_RANKS = 16  # drawn one by one
LONGEST_SHOWN = 2.0  # times the fastest candidate, and beyond the winner's slowest rank: where lines end
BEYOND = 1.05  # times that rank's time

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Html(str):
    """Text that is HTML already; any other text is escaped where it enters an element."""


def element(name: str, *children: str, **attributes: object) -> Html:
    """Return an HTML element; `class_="dim"` is its class, attributes that are None are left out."""
    inside = "".join(each if isinstance(each, Html) else escape(one_line(each)) for each in children)
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    said = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items() if value is not None)
    return Html(f"<{name}{said}>{inside}</{name}>")


def write_html(path: Path, history: History, shown: Sequence[SessionReport]) -> None:
    """Write the list of all sessions and the `shown` ones in full."""
    require_directory_of(path)
    title = f"dist_autotune: {history.directory}"
    body = [element("h1", title)]
    for name, text in history.skipped.items():
        body.append(element("p", f"{name}: {text}", class_="note"))
    body += [element("section", *_session(each)) for each in shown]
    body.append(_folded(tables.sessions_table(history.sessions)))
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    page = PAGE.format(title=escape(title), style=style, body="\n".join(body))
    path.write_bytes(page.encode("utf-8", "xmlcharrefreplace"))


def _session(shown: SessionReport) -> Iterator[Html]:
    session, report = shown.session, shown.report
    yield element("h2", session.opened.thunk)
    yield element("p", tables.verdict(shown), class_="verdict")
    heading = tables.session_heading(session).removeprefix(f"{session.opened.thunk}: ")
    started = session.opened.started_at[:16].replace("T", " ")
    yield element("p", f"{tables.session_place(session)}. {heading}, started {started} UTC", class_="dim")
    for note in tables.session_notes(session):
        yield element("p", note, class_="note")
    endings = [each for each in of_kind(session.records, SessionClosed) if is_time(each.seconds)]
    cards = [] if report.step is None else [_step_card(report.step)]
    if endings:
        cards.append(_time_card(endings))
    yield element("div", *cards, class_="cards")
    if shown.contexts:
        yield element("h3", "Contexts, the largest share of a run's launches first")
        marks = "a dot for each rank's time, | for the agreed time"
        alone = "Ranks alone would take what is marked so"
        yield element("p", f"A line for each candidate: {marks}. {alone}.", class_="dim")
    for place, (tuned, context) in enumerate(zip(report.contexts, shown.contexts, strict=True)):
        content = _context(shown, tuned, context)
        yield element("details", *content, class_="context", open="" if place < MOST_OPEN else None)
    yield from (_folded(table) for table in tables.rank_tables(session) if table.rows)


# -- the session as a whole ----------------------------------------------------------------------------------


def _card(title: str, *body: Html, note: str) -> Html:
    return element("div", element("h3", title), *body, element("p", note, class_="dim"), class_="card")


def _bar(name: str, shares: Mapping[str, float], said: str, title: str | None = None) -> Html:
    """Return one bar of several; shares: class -> its part of the longest bar."""
    parts = [element("i", class_=kind, style=f"width:{100 * share:.2f}%") for kind, share in shares.items()]
    bar = element("span", *parts, class_="bar", title=title)
    return Html(element("dt", name) + element("dd", bar, element("b", said)))


def _legend(kinds: Mapping[str, str]) -> Html:
    items = [element("span", element("i", class_=kind), said) for kind, said in kinds.items()]
    return element("p", *items, class_="legend")


def _step_card(step: StepTimes) -> Html:
    longest_ms = max(step.before_ms, step.after_ms)
    bars = [
        _bar(name, {name: ms / longest_ms}, f"{format_ms(ms)} ms")
        for name, ms in (("before", step.before_ms), ("after", step.after_ms))
    ]
    of = "All tuned launches of a step" if step.judge == BY_LAUNCH else "A step as a whole"
    note = f"{of}: {format_percent(-step.gain_percent)} %. Before: with the first configs."
    note += f" {counted(step.left_out, 'context')} without that time left out." if step.left_out else ""
    return _card("A step", element("dl", *bars, class_="bars"), note=note)


def _time_card(endings: Sequence[SessionClosed]) -> Html:
    """Return where the time of each rank went."""
    spent = [
        {kind: s if is_time(s) else 0.0 for kind, s in tables.seconds_by_kind(each).items()}
        for each in endings
    ]
    longest_s = max(sum(seconds.values()) for seconds in spent) or 1.0
    bars = []
    for ending, seconds in list(zip(endings, spent, strict=True))[:MOST_RANKS]:
        title = ", ".join(f"{kind} {s:.1f} s" for kind, s in seconds.items())
        shares = {kind: s / longest_s for kind, s in seconds.items()}
        bars.append(_bar(f"rank {ending.rank}", shares, f"{sum(seconds.values()):.1f} s", title))
    legend = _legend({kind: f"{kind} {s:.1f} s" for kind, s in spent[0].items()})
    more = len(endings) - len(bars)
    note = f"Seconds of rank {endings[0].rank}. Rest: the tuner's own, and between calls."
    note += f" {counted(more, 'more rank')} not drawn." if more else ""
    return _card("Where the time went", element("dl", *bars, class_="bars"), legend, note=note)


# -- one context ---------------------------------------------------------------------------------------------


def _context(shown: SessionReport, tuned: TunedContext, context: ContextHistory) -> Iterator[Html]:
    figures = element("span", ", ".join(_figures(shown, tuned, context)))
    yield element("summary", element("b", tuned.label), figures)
    if tuned.config_text:
        yield element("p", _unbroken(config_label(tuned.config_text)), class_="winner")
    axis, *rows = _candidates(context)
    few = rows[: tables.MOST_CANDIDATES]
    yield element("div", axis, *few)
    if rest := rows[len(few) :]:
        yield element("details", element("summary", f"{len(rest)} more"), *rest)
    yield element("p", tables.candidates_note(context), class_="dim")


def _unbroken(config: str) -> str:
    """Return a config's text, whose lines do not end between a name and its value."""
    return config.replace(": ", ":\u00a0")


def _figures(shown: SessionReport, tuned: TunedContext, context: ContextHistory) -> Iterator[str]:
    yield status_label(tuned.status, launch_bound=tuned.launch_bound)
    if tuned.ms is not None:
        yield f"{format_ms(tuned.ms)} ms" if tuned.judge == BY_LAUNCH else f"{format_ms(tuned.ms)} ms a run"
    if (share := shown.report.share_percent(tuned)) is not None:
        yield f"{share:.1f} % of the launches' time"
    if tuned.bit_class is not None:
        yield f"bits {bits_label(tuned.bit_class, tuned.output_digest)}"
    if tuned.launches > 1 and tuned.judge == BY_LAUNCH:
        yield f"{tuned.launches} launches a step"
    if tuned.gain_percent is not None:
        yield f"{format_percent(-tuned.gain_percent)} % against the first config"
    else:
        yield f"no gain known: {tuned.no_gain_reason}"
    cost = cost_alone_percent(context)
    if cost is not None and shown.report.world_size > 1:
        yield f"chosen by one rank alone: up to {format_percent(cost)} %"


def _candidates(context: ContextHistory) -> list[Html]:
    """Return the axis, then a row per candidate: the fastest first, the winner among the first ones."""
    ordered, shared = tables.in_order(context.candidates), tables.shared_parts(context)
    alone = {choice.config_id: ranks for choice, ranks in tables.ranks_by_choice(context)}
    best_ms, longest_ms = ordered[0].agreed_ms if ordered else None, _longest_ms(context, ordered)
    rows = [_axis(longest_ms)]
    first = tables.listed(context, tables.MOST_CANDIDATES)
    for each in (*first, *(each for each in ordered if each not in first)):
        is_winner = each is context.winner
        marks = [element("span", "winner", class_="mark")] if is_winner else []
        if (bit_class := context.settled.bit_classes.get(each.config)) is not None:
            marks.append(element("span", f"class {bit_class} of bits", class_="mark bits"))
        if ranks := alone.get(each.config_id):
            noun = "rank" if len(ranks) == 1 else "ranks"
            marks.append(element("span", f"{noun} {tables.ranges(ranks)} alone", class_="mark alone"))
        config = element("div", _unbroken(tables.short_config(each, shared)), *marks, class_="config")
        if each.banned:
            figures = [element("div", f"banned by {each.banned}", class_="banned")]
        else:
            over = format_percent(percent_over(each.agreed_ms, best_ms))
            figures = [_line(each, longest_ms), element("div", format_ms(each.agreed_ms), class_="ms")]
            figures.append(element("div", f"{over} %" if over != "-" else over, class_="over"))
        place = element("div", str(each.config_id), class_="id")
        rows.append(element("div", place, config, *figures, class_="row won" if is_winner else "row"))
    return rows


def _longest_ms(context: ContextHistory, ordered: Sequence[CandidateHistory]) -> float:
    """Return where the lines of a context end: all ranks' times of the winner are on them."""
    times = [ms for each in ordered for ms in _times(each)]
    best_ms = ordered[0].agreed_ms if ordered else None
    if not times or not is_time(best_ms):
        return max(times, default=1.0)
    of_winner = _times(context.winner) if context.winner is not None else []
    return min(max(times), max(LONGEST_SHOWN * best_ms, BEYOND * max(of_winner, default=0.0)))


def _times(each: CandidateHistory) -> list[float]:
    return [ms for ms in (each.agreed_ms, *each.rank_ms.values()) if is_time(ms)]


def _axis(longest_ms: float) -> Html:
    """Return the row that names the columns, with the times at the places of the lines."""
    places = (0.0, 0.5, 1.0)
    ticks = [element("i", format_ms(at * longest_ms) if at else "0") for at in places]
    head = element("div", "config", class_="config"), element("div", *ticks, class_="ticks")
    figures = element("div", "ms", class_="ms"), element("div", "over best", class_="over")
    return element("div", element("div", "id", class_="id"), *head, *figures, class_="row head")


def _line(each: CandidateHistory, longest_ms: float) -> Html:
    """Return the line on which a candidate's times stand; it ends at `longest_ms`."""

    def at(ms: float) -> str:
        return f"left:{100 * min(ms / longest_ms, 1.0):.2f}%"

    by_rank = sorted((ms, rank) for rank, ms in each.rank_ms.items())
    known = _times(each)
    marks = []
    if known:
        width = 100 * (min(max(known) / longest_ms, 1.0) - min(min(known) / longest_ms, 1.0))
        marks.append(element("i", class_="range", style=f"{at(min(known))};width:{width:.2f}%"))
    if is_time(each.agreed_ms) and each.agreed_ms <= longest_ms:
        marks.append(element("i", class_="agreed", style=at(each.agreed_ms)))
    few = by_rank if len(by_rank) <= MOST_RANKS else [by_rank[0], by_rank[len(by_rank) // 2], by_rank[-1]]
    for ms, rank in few:
        if ms <= longest_ms:
            marks.append(element("i", class_="rank", style=at(ms), title=f"rank {rank}: {format_ms(ms)} ms"))
    if max(known, default=0.0) > longest_ms:
        marks.append(element("i", "\u203a", class_="beyond", title="beyond the end of the line"))
    said = ", ".join(f"rank {rank}: {format_ms(ms)} ms" for ms, rank in few)
    return element("div", *marks, class_="track", role="img", aria_label=said)


def _folded(table: Table) -> Html:
    """Return a table that is open while it is short."""
    is_short = len(table.rows) <= MOST_OPEN
    summary = element("summary", f"{table.title} ({len(table.rows)})")
    return element("details", summary, _table(table), open="" if is_short else None)


def _table(table: Table) -> Html:
    kinds = ["figure" if name.startswith(">") else None for name in table.columns]
    names = [name.removeprefix(">") for name in table.columns]
    lines = [[element(tag, cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)]
             for tag, row in (("th", names), *(("td", row) for row in table.rows))]  # fmt: skip
    rows = element("table", *(element("tr", *line) for line in lines))
    note = [element("p", table.note, class_="dim")] if table.note else []
    return Html(element("div", rows, class_="scroll") + "".join(note))
