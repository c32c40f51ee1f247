"""What the tests of benchmarks' commands are given."""

import argparse
import runpy
import sys

import pytest


class Parsed(Exception):
    """Ends a program where it would begin to work; holds its parser."""


@pytest.fixture
def parser_of(monkeypatch: pytest.MonkeyPatch):
    """Return a function that starts a program and returns its parser, once the arguments are parsed."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(self: argparse.ArgumentParser, *given: object) -> None:
        parse_args(self, *given)
        raise Parsed(self)

    def start(module: str, *arguments: str) -> argparse.ArgumentParser:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed) as ended:
            runpy.run_module(module, run_name="__main__")
        return ended.value.args[0]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    return start
