"""The pages of the documentation, and what stands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def tables(text: str, first_heading: str) -> list[list[str]]:
    """Return the rows of all tables whose first column has that heading, as lists of cells."""
    rows, is_meant = [], False
    for line in text.splitlines():
        parts = re.split(r" \|(?= )", line.strip("|")) if line.startswith("| ") else []
        cells = [part.strip() for part in parts]
        if is_meant and cells:
            rows.append(cells)
        is_meant = line.startswith("|") and (is_meant or cells[:1] == [first_heading])
    return rows
