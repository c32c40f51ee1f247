"""Records of benchmarks: their index says what stands in them, and so does the README."""

import re

import pytest
from documents import ROOT, page, tables
from shown_commands import commands_of

RECORDS = ROOT / "docs" / "benchmarks"
README = page("README.md")
ROWS = tables((RECORDS / "README.md").read_text(), "record")


def recorded(name: str) -> str:
    return " ".join((RECORDS / name).read_text().split())


def is_recorded(figure: str, record: str) -> bool:
    """Return whether a figure of the record is this one, once it is rounded to as many digits."""
    digits = len(figure.partition(".")[2])
    half = 0.5 * 10**-digits
    return any(
        len(found.partition(".")[2]) >= digits and abs(float(found) - float(figure)) <= half + 1e-9
        for found in re.findall(r"\d+(?:\.\d+)?", record)
    )


def test_every_record_is_in_the_index_once() -> None:
    listed = [name for row in ROWS for name in re.findall(r"\]\(([^)]+)\)", row[0])]
    assert sorted(listed) == sorted(path.name for path in RECORDS.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_index_says_of_a_record_what_it_says(row: list[str]) -> None:
    name, _, date, commit, headline, command = row
    record = recorded(re.findall(r"\]\(([^)]+)\)", name)[0])
    assert date in record
    assert commit == "-" or commit in record
    assert command == "-" or command.strip("`") in record
    figures = re.findall(r"\d+(?:\.\d+)?", headline)
    assert [figure for figure in figures if not is_recorded(figure, record)] == []


@pytest.mark.parametrize("name", ["README.md", "docs/measured.md"])
def test_the_table_of_a_page_has_the_figures_of_the_records(name: str) -> None:
    names: list[str] = []
    for workload, _, result, link in tables(page(name), "workload"):
        names = re.findall(r"\]\((?:docs/)?benchmarks/([^)#]+)\)", link) or names  # "the same"
        record = " ".join(recorded(name) for name in names)
        figures = re.findall(r"\d+\.\d+", result)
        assert [figure for figure in figures if not is_recorded(figure, record)] == [], workload


def test_the_times_in_the_readme_are_recorded_ones() -> None:
    pages = " ".join(recorded(path.name) for path in RECORDS.glob("*.md"))
    measured = README.replace(dict(commands_of(README))["./launch.sh layer.py"], "")  # not in the interpreter
    stated = set(re.findall(r"\b\d+\.\d+(?= (?:us|ms|s)\b)", measured))
    assert stated
    assert {figure for figure in stated if figure not in pages} == set()
