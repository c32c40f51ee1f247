"""What is said once, where a program looks as if it meant something else than what it says."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

_told: set[str] = set()


def _tell_once(about: str, text: str) -> None:
    if about not in _told:
        _told.add(about)
        warnings.warn(text, UserWarning, stacklevel=2)


def tunes_alone(name: str) -> None:
    """Say that the ranks of a process group tune each for itself."""
    if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        _tell_once(
            "is_dist",
            f"{name} is tuned without is_dist=True in a group of {ranks} ranks: each makes its own number of "
            "runs and picks its own configs, and what waits for peers hangs. Pass is_dist=True; if each is "
            "to tune for itself, ignore this warning by warnings.filterwarnings.",
        )


@contextlib.contextmanager
def optimizer_steps(is_of_call: Callable[[], bool]) -> Iterator[list[str]]:
    """Return a list of the optimizers' classes that step in the block, on threads of the call."""
    stepped: list[str] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_of_call():
            stepped.append(type(optimizer).__name__)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield stepped
    finally:
        handle.remove()


def repeats_steps(name: str, stepped: list[str]) -> None:
    """Say that a function is run again, though it steps an optimizer and nothing is put back."""
    if stepped:
        _tell_once(
            f"steps of {name}",
            f"{name} steps an optimizer ({stepped[0]}) and is tuned by running it again and again: every run "
            'is a step. Use mode="online", which makes one run a call, or preserve=[model, optimizer].',
        )


def useless_clock(name: str, clock: object) -> str:
    """Say that a clock has given no time that can be used; return the text."""
    text = (
        f"{name}: {type(clock).__name__} gave no time that can be used, only such as are not finite or "
        "not above 0: every kernel keeps its first config. See dist_autotune.Clock for what it has to return."
    )
    _tell_once(f"clock of {name}", text)
    return text
