"""No line of the report is wider than the terminal, or COLUMNS, whatever the logs hold."""

import html
import io
import re
from pathlib import Path

import pytest
from example_files import session_records, write_session
from msgspec import structs
from rich.cells import cell_len
from rich.console import Console

from dist_autotune.logs import records
from dist_autotune.logs.writer import SessionLog
from dist_autotune.reports.history import load_history
from dist_autotune.reports.tables import history_parts, write_html

LONG = ", ".join(f"BLOCK_{name}: {64 + place}" for place, name in enumerate("MNKABCDEFGH"))
OPTIONS = "num_warps: 4, num_ctas: 1, num_stages: 3, maxnreg: None, ir_override: None"
KEY = "8192, 3584, 8192, 1, 'torch.bfloat16', 'torch.bfloat16', 'torch.int64', " + "'x" * 40 + "'"


def printed(directory: Path, width: int = 80, *, all_candidates: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    history = load_history(directory)
    console.print(*history_parts(history, history.sessions, all_candidates=all_candidates), sep="\n")
    return console.file.getvalue().splitlines()


def write_hard_session(directory: Path, ranks: int = 2, *, kernel: str = "all_gather_gemm") -> None:
    """Write a session with long configs and keys, and a ban whose reason has 50 lines."""
    candidates = tuple(f"{LONG}, SPLIT: {split}, {OPTIONS}" for split in range(6))
    for rank in range(ranks):
        here = {"session": "0123456789ab", "rank": rank}
        about = {**here, "context": "c0ffee", "kernel": kernel, "key": KEY, "run": 0}
        opened = session_records(thunk="a_function_of_a_long_name_" * 3)[0]
        facts = {"clock": "WallClock", "world_size": ranks, "ranks": tuple(range(ranks))}
        with SessionLog(directory, rank) as log:
            log.write(structs.replace(opened, **here, **facts))
            log.write(records.ContextAdmitted(**about, candidates=candidates, incumbent=0))
            for index, config in enumerate(candidates[:-1]):
                ms = 1234.5 * (index + 1) + rank
                config = {"config_id": index, "config": config}
                log.write(
                    records.Trial(**about, **config, kind="sample", k=1, n=1, launches=1, ms=ms, median_ms=ms)
                )
                log.write(records.Agreed(**about, **config, ms=ms, fastest_rank_ms=1234.5, counted=True))
            reason = "\n".join(f"line {number} of what a compiler says: error" for number in range(50))
            log.write(records.Banned(**about, config_id=5, config=candidates[5], by_rank=0, reason=reason))
            log.write(records.Note(**here, text="a long remark " * 20))


@pytest.mark.parametrize("width", [80, 60, 132])
@pytest.mark.parametrize("kernel", ["all_gather_gemm", "\u6838\u5fc3" * 20, "a[/b]", "w" * 200])
def test_no_line_is_longer_than_the_terminal(tmp_path: Path, width: int, kernel: str) -> None:
    write_hard_session(tmp_path, kernel=kernel)
    assert max(map(cell_len, printed(tmp_path, width))) <= width


def test_many_ranks_fit_and_are_named_in_ranges(tmp_path: Path) -> None:
    write_hard_session(tmp_path, ranks=40)
    lines = printed(tmp_path)
    assert max(map(cell_len, lines)) <= 80
    assert "Each rank alone would choose the winner" not in "\n".join(lines)
    assert any(line.startswith("0-39") for line in lines)


def test_options_at_their_defaults_and_what_all_candidates_share_are_said_once_at_most(tmp_path):
    write_hard_session(tmp_path)
    text = " ".join("\n".join(printed(tmp_path, 132)).split())
    for left_out in ("maxnreg", "ir_override", "num_ctas", "None"):
        assert left_out not in text
    assert text.count("num_stages: 3") == 1
    assert text.count("BLOCK_N: 65") == 1
    assert "All: BLOCK_M: 64, BLOCK_N: 65" in text


def test_a_terminal_obeys_nothing_that_a_log_says(tmp_path: Path) -> None:
    text = "\x1b[31mred\x07"

    def hostile(record: records.Record) -> records.Record:
        about = {"kernel": text, "key": text} if isinstance(record, records.ContextRecord) else {}
        reason = {"reason": text} if isinstance(record, records.Banned) else {}
        return structs.replace(record, **about, **reason)

    write_session(tmp_path, thunk=text, ranks=(0,), change=hostile)
    with SessionLog(tmp_path, 0) as log:
        log.write(records.Note(session="s1", text=text))
    for width in (80, 1000):
        lines = "\n".join(printed(tmp_path, width))
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", lines)
        assert lines.count(r"\x1b[31mred\x07") >= 4


def write_many_candidates(directory: Path) -> None:
    """Write a session of one rank with 200 candidates, the last of which has won."""
    about = {"session": "s1", "context": "c1", "kernel": "matmul", "key": "4096", "run": 0}
    configs = tuple(f"BLOCK: {number}, GROUP: {number % 7}" for number in range(200))
    with SessionLog(directory, 0) as log:
        log.write(session_records()[0])
        log.write(records.ContextAdmitted(**about, candidates=configs, incumbent=0))
        for number, config in enumerate(configs):
            ms = 300.0 - number
            known = {**about, "config_id": number, "config": config}
            log.write(records.Agreed(**known, ms=ms, fastest_rank_ms=ms, counted=True))
        log.write(records.Note(session="s1", text="40 of 200 candidates timed", is_outlook=True))
        log.write(records.Note(session="s1", text="80 of 200 candidates timed", is_outlook=True))
        timings = {config: 300.0 - number for number, config in enumerate(configs)}
        facts = {"status": "tuned", "ms": 101.0, "timings": timings, "default_ms": 300.0}
        log.write(records.ContextSettled(**about, config_id=199, config=configs[199], **facts))
        log.write(records.SessionClosed(session="s1", outcome="settled", runs=900, contexts=1))


@pytest.mark.parametrize("width", [80, 120])
def test_of_200_candidates_the_ten_fastest_are_listed(tmp_path: Path, width: int) -> None:
    write_many_candidates(tmp_path)
    lines = printed(tmp_path, width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < 40
    text = "\n".join(lines)
    assert "matmul[4096]: candidates, 10 of 200" in text
    assert "--all-candidates" in text
    assert " ".join(text.split()).count("of 200 candidates timed") == 0  # of no use once it has ended
    every = printed(tmp_path, width, all_candidates=True)
    assert "matmul[4096]: candidates" in every
    assert len(every) >= len(lines) + 188


def test_the_page_has_the_tables_and_no_text_of_a_log_becomes_html(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    write_many_candidates(tmp_path)
    write_session(tmp_path, "s2", thunk=hostile, ranks=(0,))
    history = load_history(tmp_path)
    write_html(tmp_path / "report.html", history, history.sessions)
    page = (tmp_path / "report.html").read_text()
    assert page.count("BLOCK: ") >= 200
    assert html.escape(hostile) in page
    assert hostile not in page
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|https?:", page)
