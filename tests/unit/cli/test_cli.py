"""The command line: what it prints, and that a mistake is one line with the next step and exit code 2."""

import json
import os
from pathlib import Path

import pytest
from example_files import CONFIGS, KEY, entry, write_session
from typer.testing import CliRunner, Result

from dist_autotune.cli.commands import app
from dist_autotune.formatting import WALL_CLOCK_NOTE
from dist_autotune.storage.winners import Winners
from dist_autotune.version import __version__


def run(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), input=answer)


# ---- report


def test_report_shows_winners_spread_stragglers_and_each_rank_alone(tmp_path: Path) -> None:
    write_session(tmp_path / "logs")
    result = run("report", "logs")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "100.0 2.000 +50.0 +33.3 +100.0 tuned matmul[4096, fp16]" in rows
    assert "1 6 6 +33.3" in rows  # rank 1: slowest in 6 of 6
    assert f"0 0 1.000 4.000 +100.0 {CONFIGS[0]}" in rows  # rank 0 alone
    assert WALL_CLOCK_NOTE not in result.stdout


def test_report_lists_every_session_and_shows_the_newest_or_all(tmp_path: Path) -> None:
    for name in ("s1", "s2"):
        write_session(tmp_path / "logs", name)
    newest, every = run("report", "logs").stdout, run("report", "logs", "--all").stdout
    assert ("session s1," in newest, "session s2," in newest) == (False, True)
    assert ("session s1," in every, "session s2," in every) == (True, True)
    assert "\ns1  " in newest


HOSTILE = {
    "nesting": b"[" * 5000 + b"\n",
    "a lone surrogate": b'{"schema":1,"event":"note","session":"s1","rank":0,"text":"a \\udcff b"}\n',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("command", [["report"], ["report", "--html", "all.html"]], ids=" ".join)
def test_no_line_of_a_log_and_no_pipe_among_the_logs_stops_a_command(tmp_path, command, line):
    write_session(tmp_path / "logs")
    with (tmp_path / "logs" / "rank-0.jsonl").open("ab") as file:
        file.write(line)
    os.mkfifo(tmp_path / "logs" / "rank-2.jsonl")
    result = run(*command, "logs")
    assert result.exit_code == 0, result.output
    shown = (tmp_path / "all.html").read_text() if "--html" in command else result.stdout
    assert "rank-2.jsonl" in shown
    assert "not a regular file" in shown
    assert "1 x " in shown


def test_the_command_says_its_version() -> None:
    assert run("--version").stdout == f"dist-autotune {__version__}\n"


# ---- cache


def test_cache_list_takes_kernel_and_device(tmp_cache: Path) -> None:
    Winners(tmp_cache).put(entry(), entry(kernel="add"), entry(kernel="add", device="NVIDIA H200"))
    everything = run("cache", "list").stdout
    assert "3 entries for NVIDIA H200, test device in" in everything
    assert "1 entry for NVIDIA H200 in" in run("cache", "list", "--kernel", "ad", "--device", "H200").stdout
    assert run("cache", "list", "--kernel", "div").stdout.startswith("No such entries in")


@pytest.mark.parametrize("name", ["mat", KEY.digest[:6], KEY.file_name], ids=["kernel", "digest", "file"])
def test_cache_show_prints_an_entry_as_json(tmp_cache: Path, name: str) -> None:
    Winners(tmp_cache).put(entry())
    Winners(tmp_cache).put(entry(kernel="add"))
    result = run("cache", "show", name)
    shown = json.loads(result.stdout)
    assert list(shown)[:2] == ["config", "ms"]
    assert (shown["key"]["kernel"], shown["timings"]) == ("matmul", {"BLOCK=64": 0.5, "BLOCK=128": 0.25})
    assert result.stderr == f"{tmp_cache / KEY.file_name}\n"


def test_cache_clear_takes_a_kernel(tmp_cache: Path) -> None:
    Winners(tmp_cache).put(entry(kernel="add", key="64"), entry(key="8192"))

    def left(*arguments: str) -> set[str]:
        assert run("cache", "clear", "--yes", *arguments).exit_code == 0
        return {each.title for each in Winners(tmp_cache).entries()}

    assert left("--kernel", "div") == {"add[64]", "matmul[8192]"}
    assert run("cache", "clear", "--kernel", "add", answer="n\n").exit_code == 1
    assert left("--kernel", "add") == {"matmul[8192]"}


# ---- mistakes

MISTAKES = {
    "report logs --kernel add": ["No kernel 'add'", "matmul"],
    "report logs --html away/all": ["No such file or directory: 'away/all'"],
    "report nowhere": ["There is no directory nowhere", "dist-autotune report DIR"],
    "report empty": ["holds no records", "dist-autotune report DIR"],
    "report garbage": ["skipped 2 lines: 2 x damaged JSON"],
    "cache import away.json": ["There is no file away.json", "cache export FILE"],
    "cache show add": ["No entry of 'add'", "dist-autotune cache list"],
}


@pytest.mark.parametrize(("command", "parts"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_the_next_step(tmp_path, command, parts):
    write_session(tmp_path / "logs", "aa1")
    for name in ("empty", "garbage"):
        (tmp_path / name).mkdir()
    (tmp_path / "garbage" / "rank-0.jsonl").write_text("garbage\ngarbage\n")
    arguments = command.split()
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert all(part in result.stderr for part in parts)
