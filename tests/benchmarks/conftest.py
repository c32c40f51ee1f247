"""What the tests of benchmarks' commands are given."""

import argparse
import functools
import runpy
import sys

import pytest

import dist_autotune
from benchmarks.common import tuned
from benchmarks.fresh_sessions import plans


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


@pytest.fixture
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are forked try each candidate once; the default races for AllGatherGemm."""
    once = functools.partial(dist_autotune.contextual_autotune, n_warmup=0, n_repeat=1)
    for module in (dist_autotune, tuned, plans):  # of examples, of operations, of fresh sessions
        monkeypatch.setattr(module, "contextual_autotune", once)
