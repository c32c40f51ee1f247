"""docs/glossary.md: its names are there."""

import importlib
import re

import pytest
from documents import page

ROWS = re.findall(
    r"^\| ([a-z][a-z ]*) \| .* \| `([\w.]+)(?::(\w+))?` \|$", page("docs/glossary.md"), re.MULTILINE
)


@pytest.mark.parametrize(("word", "module", "name"), ROWS, ids=[word for word, *_ in ROWS])
def test_a_word_is_what_its_name_says(word: str, module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name), f"{word}: {module} has no {name}"
