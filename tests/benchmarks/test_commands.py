"""Commands of benchmarks: those on the pages parse, and every program tells what it does and takes."""

import re
import shlex

import pytest
from documents import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
COMMAND = re.compile(r"-m (benchmarks[.\w]+)([^`|]*)")
COMMANDS = sorted(
    {(found[1], found[2].strip()) for page in PAGES for found in COMMAND.finditer(page.read_text())}
)
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


# Programs are imported by other tests, too.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@pytest.mark.parametrize(("module", "arguments"), COMMANDS, ids=str)
def test_a_command_of_a_page_parses(module, arguments, parser_of):
    parser_of(module, *shlex.split(arguments))


NEEDED = {"benchmarks.regret": ["--op", "gemm_rs"], "benchmarks.common.render": ["RECORD"]}


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_tells_what_it_does_how_it_starts_and_what_it_takes(module, parser_of):
    parser = parser_of(module, *NEEDED.get(module, []))
    summary, usage = parser.description.split("\n\n")[:2]
    assert summary.endswith(".")
    assert re.match(rf" +(\./launch\.sh|python)( --[\w-]+( \d+)?)* -m {module}\b", usage), usage
    unexplained = [action.dest for action in parser._actions if action.help is None]
    assert unexplained == []
