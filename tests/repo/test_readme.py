"""What the README and other pages state: their programs run, figures are recorded, links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, blocks, page, without_blocks
from kernels_for_tests import Bench, launch, numbers
from shown_commands import assert_prints, commands_of

from dist_autotune import settings

README = page("README.md")
HOW_IT_WORKS = page("docs/how-it-works.md")


PROGRAM, LOOP = blocks(README, "python")


def test_the_program_of_the_readme_prints_what_it_shows() -> None:
    Path("layer.py").write_text(PROGRAM)
    shown = dict(commands_of(README))
    assert_prints("./launch.sh layer.py", shown["./launch.sh layer.py"])


def test_the_loop_of_the_readme_is_tuned() -> None:
    kernel, x, results = Bench().kernel({16: 3.0, 32: 1.0}), numbers(), []
    names: dict[str, Any] = {"batches": [x] * 100, "train": lambda x: results.append(launch(kernel, x))}
    exec(LOOP, names)
    assert names["tuner"].settled
    assert list(kernel.cache.values()) == [kernel.best_config]
    assert all(torch.equal(y, x + 1) for y in results)


def test_the_server_of_the_page_settles_every_shape() -> None:
    kernel = Bench().kernel({16: 3.0, 32: 1.0})
    batches = [numbers(n) for n in (16, 32, 64)]
    (program,) = blocks(page("docs/shipping-results.md"), "python")
    exec(program, {"model": lambda tokens: launch(kernel, tokens), "example_batches": batches})
    assert len(kernel.cache) == len(batches)


def test_the_step_of_the_page_keeps_its_bits() -> None:
    kernel, model = Bench().kernel({16: 3.0, 32: 1.0}), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    names = {"model": model, "optimizer": optimizer, "train": lambda batch: launch(kernel, batch)}
    program, *_ = blocks(page("docs/reproducible-bits.md"), "python")
    exec(program, names)
    assert torch.equal(names["step"](numbers()), numbers() + 1)
    (context,) = names["step"].report.contexts
    assert context.same_bits is True


def test_docs_list_every_environment_variable() -> None:
    listed = set(re.findall(r"^\| `(DIST_AUTOTUNE_\w+)`", page("docs/environment.md"), re.M))
    assert listed == set(settings.KNOWN_VARIABLES)


def test_every_room_is_in_the_table_of_rooms() -> None:
    table = HOW_IT_WORKS.partition("| room | what it is for |")[2].partition("\n\n")[0]
    rooms = {path.parent.name for path in (ROOT / "dist_autotune").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == rooms - {"kernels"}


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_the_links_of_a_page_lead_somewhere(path: Path) -> None:
    text = without_blocks(path.read_text())
    for target, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not heading or heading in anchors(linked.read_text()), f"{target}#{heading}"


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index_of_the_docs() -> None:
    index = page("docs/README.md")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
