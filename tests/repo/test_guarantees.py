"""Every guarantee of docs/guarantees.md names tests that there are, and says which of them need a GPU."""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
GUARANTEES = (TESTS.parent / "docs" / "guarantees.md").read_text()
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
ON_A_GPU = re.compile(r"GPU(?: \([^)]*\))?: (?:`[\w/.:]+`(?:, )?)+")


@dataclass(frozen=True)
class Row:
    number: str
    happens: str
    relies: str
    tests: str

    @property
    def on_gpus(self) -> set[tuple[str, str]]:
        return {name for part in ON_A_GPU.findall(self.tests) for name in NAMED.findall(part)}

    @property
    def on_cpus(self) -> set[tuple[str, str]]:
        return set(NAMED.findall(self.tests)) - self.on_gpus


ROWS = [Row(*cells) for cells in ROW.findall(GUARANTEES)]


@functools.cache
def source_of(file: str) -> str:
    """Return the text of the one test file of this name, whatever folder it lies in."""
    (path,) = TESTS.rglob(file)
    return path.read_text()


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(source_of(file))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def marks_of_module(file: str) -> str:
    tree = ast.parse(source_of(file))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return " ".join(ast.unparse(node.value) for node in assigned if "pytestmark" in ast.unparse(node.targets))


def decorators_of(file: str, name: str) -> list[str]:
    return [ast.unparse(decorator) for decorator in functions_of(file)[name].decorator_list]


def needs_a_gpu(file: str, name: str) -> bool:
    """Return whether no case of the test runs without a GPU."""
    marks = decorators_of(file, name)
    return any(re.match(r"pytest\.mark\.gpu\b", mark) for mark in [*marks, marks_of_module(file)])


def test_the_rows_are_numbered_in_order():
    numbers = [row.number for row in ROWS]
    sections = re.findall(r"^## ([A-Z])\. ", GUARANTEES, re.MULTILINE)
    assert len(numbers) == len(re.findall(r"^\| [A-Z]\d+ ", GUARANTEES, re.MULTILINE))  # no row is malformed
    for section in sections:
        own = [int(number[1:]) for number in numbers if number.startswith(section)]
        assert own == sorted(set(own))  # a row keeps its number when others go
        assert own
    assert {number[0] for number in numbers} == set(sections)


def test_a_guarantee_has_a_test_that_needs_no_gpu_or_says_that_it_needs_one():
    without = [row for row in ROWS if not (row.on_cpus or row.on_gpus)]
    assert [row.number for row in without if not re.search(r"\bGPU\b.*\bno test\b", row.tests)] == []


def test_the_tests_of_a_guarantee_exist():
    for row in ROWS:
        named = row.on_cpus | row.on_gpus
        assert [f"{file}::{name}" for file, name in named if name not in functions_of(file)] == [], row.number
        assert "`" not in NAMED.sub("", row.tests), row.number  # everything in backticks is a name


def test_marks_fit_what_the_table_says():
    for row in ROWS:
        for file, name in row.on_cpus:
            assert not needs_a_gpu(file, name), f"{name} needs a GPU, and the table does not say so"
        for file, name in row.on_gpus:
            assert needs_a_gpu(file, name), f"{name} runs without a GPU, and the table says GPU"
        for file, name in row.on_cpus | row.on_gpus:
            marks = decorators_of(file, name)
            assert not any(re.match(r"pytest\.mark\.(xfail|skip)\b", mark) for mark in marks), name
