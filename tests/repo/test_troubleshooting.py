"""docs/troubleshooting.md quotes messages that the package has, and leaves out none of its errors."""

import ast
import functools
import re
from pathlib import Path

import pytest
from documents import ROOT, page, tables

import dist_autotune

PAGE = page("docs/troubleshooting.md")
ROWS = [*tables(PAGE, "error"), *(["", *row] for row in tables(PAGE, "the report warns"))]


def sources_of_the_package() -> list[Path]:
    return [path for room in ("dist_autotune", "kernels") for path in (ROOT / room).rglob("*.py")]


def text_of(node: ast.AST) -> str:
    """Return a literal's text, with `…` for each value that it holds."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


@functools.cache
def literals() -> list[str]:
    """Return the texts of all literals of the package that are no docstrings."""
    nodes = [node for path in sources_of_the_package() for node in ast.walk(ast.parse(path.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    kinds = ast.JoinedStr, ast.Constant
    return [text_of(node) for node in nodes if isinstance(node, kinds) and id(node) not in docstrings]


@pytest.mark.parametrize("message", [re.match(r"`(.+?)`(?: |$)", row[1])[1] for row in ROWS])
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    pattern = re.compile(".*?".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in literals())


def test_every_public_error_and_warning_has_a_row() -> None:
    public = [getattr(dist_autotune, name) for name in dist_autotune.__all__]
    raised = {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, Exception)}
    named = {row[0].strip("`") for row in ROWS} - {""}
    assert raised <= named


def test_every_error_that_is_named_is_in_the_source() -> None:
    sources = "".join(path.read_text() for path in sources_of_the_package())
    for name in {row[0].strip("`") for row in ROWS} - {""}:
        assert re.search(rf"\b{name}\b", sources), name
