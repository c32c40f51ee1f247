"""`cache export` and `cache import`: what they say, what they refuse, and that nothing is lost silently."""

from pathlib import Path
from typing import Any

import pytest
import triton
from example_files import entry
from msgspec import structs
from typer.testing import CliRunner, Result

from dist_autotune.cli.commands import app
from dist_autotune.storage.winners import Entry, Winners

HERE = {"device": "interpreter", "capability": "", "driver": "", "triton_version": triton.__version__}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def here(winner: str = "c1", **key: Any) -> Entry:
    """Return an entry for this machine."""
    return entry(winner, **{**HERE, **key})


@pytest.fixture
def exported(tmp_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that exports entries, and leaves an empty cache."""

    def export(*entries: Entry) -> Winners:
        Winners(tmp_cache).put(*entries)
        assert run("export", "all.json").exit_code == 0
        monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", str(tmp_path / "other"))
        return Winners(tmp_path / "other")

    return export


def test_where_winners_differ_that_of_the_cache_stays_unless_it_is_replaced(exported: Any) -> None:
    other = exported(here())
    ours = structs.replace(here("c0"), config="BLOCK=64", created_at="2025-12-31")
    other.put(ours)
    result = run("import", "all.json")
    assert result.exit_code == 0
    kept = "matmul[4096, fp16]: kept the cache's; --replace takes BLOCK=128"
    assert result.stdout.splitlines()[1] == kept
    assert list(other.entries()) == [ours]
    result = run("import", "all.json", "--replace")
    assert result.stdout.splitlines()[1] == "matmul[4096, fp16]: took BLOCK=128"
    assert list(other.entries()) == [here()]


def test_a_terminal_obeys_nothing_that_a_bundle_says(exported: Any) -> None:
    other = exported(here(kernel="\x1b[31mred"))
    other.put(here("c0", kernel="\x1b[31mred"))
    results = [run(*arguments) for arguments in (("import", "all.json"), ("list",), ("show", "\x1b"))]
    assert not [each for each in results if "\x1b" in each.output]
    assert all(r"\x1b[31mred" in each.output for each in results[:2])


def test_what_is_for_other_hardware_is_stored_and_told(exported: Any) -> None:
    other = exported(here(key="1"), entry(key="2"))
    result = run("import", "all.json")
    assert "2 new, 0 as there" in result.stdout
    told = "1 of 2 entries not for this machine, which has interpreter, but for test device 9.0\n"
    assert result.stderr == told
    assert sorted(each.key.key for each in other.entries()) == ["1", "2"]


def test_only_some_entries_may_be_exported(tmp_cache: Path) -> None:
    Winners(tmp_cache).put(
        entry(kernel="one"), entry(kernel="two"), entry(kernel="two", device="NVIDIA H200")
    )
    assert "Exported 1 entry" in run("export", "a.json", "--kernel", "one").stdout
    assert "Exported 3 entries" in run("export", "b.json", "--kernel", "one", "--kernel", "two").stdout
    assert "Exported 2 entries" in run("export", "part.json", "--kernel", "tw").stdout
    assert "Exported 1 entry" in run("export", "c.json", "--device", "H200").stdout
    nothing = run("export", "d.json", "--kernel", "three")
    assert nothing.exit_code == 2
    assert "No such entries in" in nothing.stderr
    assert not Path("d.json").exists()


def test_an_export_overwrites_nothing_unless_asked_for(tmp_cache: Path) -> None:
    Winners(tmp_cache).put(entry())
    Path("all.json").write_text("mine")
    result = run("export", "all.json")
    assert (result.exit_code, Path("all.json").read_text()) == (2, "mine")
    assert "--replace" in result.stderr
    assert run("export", "all.json", "--replace").exit_code == 0
    assert "away is no directory; make it first" in run("export", "away/all.json").stderr
