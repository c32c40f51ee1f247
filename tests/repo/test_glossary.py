"""docs/glossary.md: its names are there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/glossary.md").read_text()
ROWS = re.findall(r"^\| ([a-z][a-z ]*) \| .* \| `([\w.]+)(?::(\w+))?` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("word", "module", "name"), ROWS, ids=[word for word, *_ in ROWS])
def test_a_word_is_what_its_name_says(word: str, module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name), f"{word}: {module} has no {name}"
