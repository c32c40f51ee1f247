"""Options that all benchmarks have. No torch: a process that only starts others holds no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path

NOT_MEASURED = ("--json", "--commit")  # options, each with a value, that a record's command leaves out


def kept_arguments(arguments: Iterable[str], left_out: Collection[str]) -> list[str]:
    """Return the arguments of a command without these options, each of which has a value."""
    kept, given = [], iter(arguments)
    for argument in given:
        if argument in left_out:
            next(given, None)
        elif argument.partition("=")[0] not in left_out:
            kept.append(argument)
    return kept


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the description, line by line."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the record that a run leaves."""
    parser.add_argument("--json", type=Path, help="the record; `benchmarks.common.render` makes its page")
    parser.add_argument("--commit", help="of the measured tree, where git cannot tell")
