"""docs/options.md, held against the signature and against what `Options` accepts."""

import ast
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import blocks, page, tables

import dist_autotune
from dist_autotune import ContextualAutotuner, contextual_autotune
from dist_autotune.options import Options

PAGE = page("docs/options.md")
ROWS = tables(PAGE, "option")
NAMES = {row[0].strip("`").partition("=")[0]: row for row in ROWS}
BY_NAME = pytest.mark.parametrize("name", NAMES)

# What the examples name: whether a group has ended is asked where the function is called.
EXAMPLES_NAME = {
    **{name: getattr(dist_autotune, name) for name in dist_autotune.__all__},
    "mesh": {"tp": dist.ProcessGroup(0, 1)},
    "model": torch.nn.Linear(1, 1),
    "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]),
}


def option_of(text: str) -> tuple[str, Any]:
    """Return the name and the value of `name=value`."""
    ((name, value),) = eval(f"dict({text.strip('`')})", dict(EXAMPLES_NAME)).items()
    return name, value


def test_every_option_has_one_row() -> None:
    assert sorted(row[0].strip("`").partition("=")[0] for row in ROWS) == sorted(
        inspect.signature(Options).parameters
    )
    assert set(NAMES) == set(inspect.signature(contextual_autotune).parameters) - {"fn"}


@BY_NAME
def test_the_default_is_that_of_the_signature(name: str) -> None:
    default = inspect.signature(contextual_autotune).parameters[name].default
    assert NAMES[name][0] == f"`{name}={default!r}`".replace("'", '"')


@BY_NAME
def test_the_example_and_every_value_that_is_named_can_be_used(name: str) -> None:
    _, takes, _, _, example = NAMES[name]
    named, value = option_of(example)
    assert named == name
    values = [value, *map(ast.literal_eval, re.findall(r'`("\w+")`', takes))]
    for value in values:
        assert isinstance(contextual_autotune(print, **{name: value}), ContextualAutotuner)


def test_what_is_compared_between_ranks_is_listed() -> None:
    listed = re.search(r"must be equal on all ranks \((.*?)\)", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(Options().agreed_fields())


def test_its_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    for program in blocks(PAGE, "python"):
        exec(program, {})
    assert "pieces[64]" in capsys.readouterr().out
