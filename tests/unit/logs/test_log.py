"""Logs: what is in the files, that nothing in them is lost or torn, and what they cost."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dist_autotune.codec import to_json
from dist_autotune.logs import records, writer
from dist_autotune.logs.records import describe_skipped, read_records
from dist_autotune.logs.writer import SessionLog
from ranks import assert_all_ok, run_ranks


def note(text: str, rank: int = 0) -> records.Note:
    return records.Note(session="s1", rank=rank, text=text)


def read(path: Path) -> list[records.Record]:
    skipped: Counter[str] = Counter()
    found = list(read_records(path, skipped))
    assert not skipped
    return found


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line]


# ---- several writers, and writers that die


def test_processes_with_the_same_rank_number_neither_truncate_nor_tear_lines(tmp_path: Path) -> None:
    def append_notes(writer: int) -> None:
        with SessionLog(tmp_path, 0) as log:
            for number in range(count):
                log.write(note(f"{writer}:{number} " + "x" * 500))

    writers, count = 4, 500
    assert_all_ok(run_ranks(append_notes, writers, init="none"))
    texts = [record.text for record in read(tmp_path / "rank-0.jsonl")]
    for number in range(writers):
        own = [int(text.split()[0].split(":")[1]) for text in texts if text.startswith(f"{number}:")]
        assert own == list(range(count))
    assert all(line.endswith("x" * 500) for line in lines(tmp_path / "rank-0.log"))
    assert len(lines(tmp_path / "rank-0.log")) == writers * count


# ---- what can go wrong


def test_a_directory_that_cannot_be_written_is_one_warning_then_silence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    log = SessionLog(tmp_path / "file" / "logs", 0)
    with pytest.warns(RuntimeWarning, match="Tuning goes on without them") as caught:
        log.write(note("first"))
    log.write(note("second"))  # warnings are errors: this says that there is none
    assert len(caught) == 1


def test_a_full_disk_is_one_warning_and_its_torn_line_spoils_no_other(tmp_path, monkeypatch):
    write = os.write
    with SessionLog(tmp_path, 0) as log:
        log.write(note("whole"))
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.warns(RuntimeWarning, match="no space"):
            log.write(note("torn"))
        monkeypatch.undo()
    with SessionLog(tmp_path, 0) as log:
        log.write(note("space again"))
    skipped: Counter[str] = Counter()
    assert list(read_records(tmp_path / "rank-0.jsonl", skipped)) == [note("whole"), note("space again")]
    assert skipped == {"damaged JSON": 1}


def test_lines_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path) -> None:
    good = to_json(note("good"))
    path = tmp_path / "rank-0.jsonl"
    bad = [
        good[:30],
        "[]",
        '{"schema": 1}',
        '{"schema": 99, "event": "note"}',
        '{"schema": 1, "event": "unheard_of"}',
        '{"schema": 1, "event": "note"}',
        '{"schema": 1, "event": "note", "text": 5}',
    ]
    path.write_text("\n".join([good, *bad, good, ""]))
    skipped: Counter[str] = Counter()
    assert list(read_records(path, skipped)) == [note("good"), note("good")]
    assert skipped.total() == len(bad)
    assert skipped["damaged JSON"] == 1
    assert "schema 99, expected 1" in describe_skipped(skipped)
    assert "Expected `str`, got `int` - at `$.text`" in describe_skipped(skipped)
    assert describe_skipped(skipped).startswith("skipped 7 lines: 1 x damaged JSON")


def test_a_rank_keeps_the_newest_records_in_files_of_a_bounded_size(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "MOST_BYTES", 2000)
    with SessionLog(tmp_path / "logs", 0) as log, SessionLog(tmp_path / "logs", 0) as other:
        for number in range(100):
            (other if number % 3 else log).write(note(f"note {number}"))
    files = sorted((tmp_path / "logs").glob("rank-0*"))
    assert [path.name for path in files] == [
        "rank-0.jsonl", "rank-0.log", "rank-0.older.jsonl", "rank-0.older.log"
    ]  # fmt: skip
    assert all(path.stat().st_size <= 2000 for path in files)
    kept = [read_records(files[place], Counter()) for place in (2, 0)]
    numbers = [int(each.text.split()[1]) for own in kept for each in own]
    assert numbers == list(range(numbers[0], 100))


def test_git_ignores_a_new_directory_of_logs_and_none_that_was_there(tmp_path: Path) -> None:
    for name in ("new", "mine"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        with SessionLog(tmp_path / name, 0) as log:
            log.write(note("text"))
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "mine" / ".gitignore").exists()
