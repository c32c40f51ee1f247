"""Winners as the files in which stock Triton keeps its own results (`triton.autotune(cache_results=True)`).

Such a file knows neither world size nor constants: of several entries for one file the newest is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..codec import to_json
from .winners import Entry

NO_FILE = "stock Triton keeps no file of it: a config has a hook or is not JSON, or it was interpreted"


def stock_files(entries: Iterable[Entry]) -> tuple[dict[str, str], list[tuple[Entry, str]]]:
    """Return the files by path below Triton's cache directory, and the entries left out with reasons."""
    owners: dict[str, Entry] = {}
    left_out = []
    for entry in sorted(entries, key=lambda entry: entry.created_at, reverse=True):
        path = entry.evidence.triton_file
        if not (entry.evidence.config and re.fullmatch(r"[A-Z2-7]+/\w+\.autotune\.json", path)):
            left_out.append((entry, NO_FILE))
        elif (owner := owners.setdefault(path, entry)) is not entry:
            left_out.append((entry, f"that of {owner.created_at}, {owner.config}, has its place"))
    return {path: _content(entry) for path, entry in owners.items()}, left_out


def _content(entry: Entry) -> str:
    key = [value for _, value in entry.evidence.arguments]
    timings = [[dict(entry.evidence.config), 3 * [entry.ms]]]
    return to_json({"key": key, "configs_timings": timings}, indent=True) + "\n"
