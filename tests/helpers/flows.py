"""Drive a search that asks for one candidate or plan after another, as a session does."""

from collections.abc import Callable, Generator
from typing import Any


def driven(flow: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Answer whatever a flow asks for; return all that it asked for, and what it ends with."""
    asked = [next(flow)]
    while len(asked) < 10_000:
        try:
            asked.append(flow.send(answer(asked[-1])))
        except StopIteration as stop:
            return asked, stop.value
    raise AssertionError("the flow does not end")
