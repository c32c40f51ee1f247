"""The HTML report: one well-formed page that loads nothing and runs nothing, whatever the logs hold."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_files import write_session
from msgspec import structs

from dist_autotune.logs import records
from dist_autotune.logs.writer import SessionLog
from dist_autotune.reports import html
from dist_autotune.reports.history import load_history
from dist_autotune.reports.report import reports_of

VOID = {"meta"}
LOADS = {"link", "script", "img", "iframe", "object", "embed", "base", "form"}


class Page(HTMLParser):
    """Reads a page: its elements, which must be closed in order, its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def write_page(directory: Path) -> str:
    history = load_history(directory)
    path = directory / "report.html"
    html.write_html(path, history, reports_of(history, history.sessions))
    return path.read_text()


def test_the_page_loads_nothing_and_is_well_formed(tmp_path: Path) -> None:
    write_session(tmp_path, "s1")
    write_session(tmp_path, "s2")
    written = write_page(tmp_path)
    page = Page(written)
    assert not LOADS & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", written)
    assert page.tags.count("section") == 2
    assert "prefers-color-scheme: dark" in written
    assert 'name="viewport"' in written


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\"'><i onload=x>", "{style} {0}", "\u6838\x1b[31m"]
)
def test_no_text_of_a_log_becomes_html(tmp_path: Path, text: str) -> None:
    def hostile(record: records.Record) -> records.Record:
        about = {"kernel": text, "key": text} if isinstance(record, records.ContextRecord) else {}
        named = {"config": text} if isinstance(record, records.ConfigRecord) else {}
        reason = {"reason": text} if isinstance(record, records.Banned) else {}
        return structs.replace(record, **about, **named, **reason)

    write_session(tmp_path, thunk=text, ranks=(0,), change=hostile)
    with SessionLog(tmp_path, 0) as log:
        log.write(records.Note(session="s1", text=text))
    page = Page(write_page(tmp_path))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert text.partition("\x1b")[0] in page.text
    assert "\x1b" not in page.text


@pytest.mark.parametrize("ms", [2.0, 1e-300, math.inf, math.nan, -1.0, 0.0], ids=str)
def test_widths_and_places_are_percentages_between_0_and_100(tmp_path: Path, ms: float) -> None:
    def odd(record: records.Record) -> records.Record:
        if not isinstance(record, records.ContextSettled):
            return record
        return structs.replace(record, ms=ms, default_ms=ms, timings={**record.timings, record.config: ms})

    write_session(tmp_path, change=odd)
    page = Page(write_page(tmp_path))
    found = [style for name, style in page.attributes if name == "style"]
    numbers = [float(number) for style in found for number in re.findall(r":([^;%]*)%", style)]
    assert numbers
    assert all(0 <= number <= 100 for number in numbers)


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_log_that_ends_anywhere_has_a_page(tmp_path: Path, kept: int) -> None:
    write_session(tmp_path, ranks=(0,), part=slice(kept))
    assert "unfinished" in Page(write_page(tmp_path)).text


def test_verdict_hosts_and_versions_stand_above_all_and_long_lists_are_folded(tmp_path: Path) -> None:
    for number in range(5):
        write_session(tmp_path, f"s{number}")
    for path in tmp_path.glob("rank-*.jsonl"):
        path.write_text(path.read_text().replace('"node":""', f'"node":"host-{path.stem[-1]}"'))
    page = write_page(tmp_path)
    (section, *_) = page.split("<section>")[1:]
    head = Page(section.partition('<div class="scroll">')[0]).text
    assert "50.0 % less time than the first configs: 2.000 ms, not 4.000" in head
    assert "test device; 2 hosts: host-0, host-1; " in head
    assert "triton 3.6.0" in head
    assert "<details><summary>Sessions (5)</summary>" in page


def test_a_candidate_has_its_times_of_all_ranks_and_a_bar_of_its_speed(tmp_path: Path) -> None:
    """The winner's slowest rank takes more than twice the fastest candidate's time."""

    def slower(record: records.Record) -> records.Record:
        is_its = isinstance(record, records.Trial) and (record.config_id, record.rank) == (1, 1)
        return structs.replace(record, median_ms=9.0, ms=9.0) if is_its else record

    write_session(tmp_path, change=slower)
    page = write_page(tmp_path)
    rows = [row for row in re.findall(r"<tr>.*?</tr>", page) if 'class="bar"' in row]
    widths = [float(re.findall(r"width:([^%]*)%", row)[0]) for row in rows]
    assert widths == pytest.approx([100.0, 100 * 2.0 / 3.3, 50.0, 0.0], abs=0.1)  # the last one is banned
    assert 'title="rank 0: 1.500 ms, rank 1: 9.000 ms"' in rows[0]
    assert rows[0].endswith(">winner</td></tr>")
    assert "banned on all ranks by rank 1" in rows[3]
