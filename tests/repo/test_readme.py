"""What the README and the docs state, held against the code and the recorded figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from documents import ROOT, blocks, page
from kernels_for_tests import Bench, launch, numbers

from dist_autotune import settings

README = page("README.md")
HOW_IT_WORKS = page("docs/how-it-works.md")


def test_the_program_of_the_readme_runs() -> None:
    kernel, x = Bench().kernel({16: 3.0, 32: 1.0}), numbers()
    (program,) = blocks(README, "python")
    names: dict[str, Any] = {"op": lambda x, w: launch(kernel, x), "x": x, "w": None}
    exec(program, names)
    assert torch.equal(names["y"], x + 1)
    assert names["layer"].settled
    assert list(kernel.cache.values()) == [kernel.best_config]


@pytest.mark.parametrize("text", [README, HOW_IT_WORKS], ids=["README", "how-it-works"])
def test_the_schedule_table_is_what_happens(text: str) -> None:
    rows = re.findall(r"^\| kernel-(\d) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 2
    bench, x = Bench(), numbers()
    kernels = [bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 2.0, 32: 1.0, 64: 3.0})]
    launched: list[list[str]] = [[], []]

    def thunk() -> None:
        for kernel, configs in zip(kernels, launched, strict=True):
            launch(kernel, x)
            configs.append(f"c{kernel.configs.index(kernel.best_config)}")

    bench.tune(thunk, n_warmup=0, n_repeat=2)()
    for index, cells in rows:
        winner = launched[int(index)][-1]
        stated = [winner if cell == "best" else cell for cell in cells.split(" | ")]
        assert launched[int(index)] == stated


def test_docs_list_every_environment_variable() -> None:
    listed = set(re.findall(r"^\| `(DIST_AUTOTUNE_\w+)`", page("docs/environment.md"), re.M))
    assert listed == set(settings.KNOWN_VARIABLES)


def test_every_room_is_in_the_table_of_rooms() -> None:
    table = HOW_IT_WORKS.partition("| room | what it is for |")[2].partition("\n\n")[0]
    rooms = {path.parent.name for path in (ROOT / "dist_autotune").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == rooms - {"kernels"}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README + HOW_IT_WORKS))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists() or (ROOT / "docs" / link).exists()


def test_the_times_in_the_readme_are_recorded_ones() -> None:
    recorded = "\n".join(path.read_text() for path in (ROOT / "docs" / "benchmarks").glob("*.md"))
    stated = set(re.findall(r"\b\d+\.\d{3,4}(?= ms| +[\d.]+ %)", README))
    assert stated
    assert {figure for figure in stated if figure not in recorded} == set()


def test_every_record_is_in_the_index_of_records() -> None:
    records = ROOT / "docs" / "benchmarks"
    listed = re.findall(r"\]\(([\w.-]+\.md)\)", (records / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in records.glob("*.md") if path.name != "README.md")


def test_every_page_is_in_the_index_of_the_docs() -> None:
    index = page("docs/README.md")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
