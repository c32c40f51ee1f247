"""A flow of a strategy that may be the user's."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

from ..errors import FlowFailed, TuningError
from .rules import Rules
from .strategies import Warmup, Winner

_ASKS_PER_CANDIDATE = 1000  # a flow that asks for banned candidates again and again is broken


class RunningFlow:
    """Asks for one of so many candidates after another; FlowFailed where the strategy breaks its contract."""

    def __init__(self, rules: Rules, candidates: int) -> None:
        self.index: int | None = None  # of the candidate asked for; None: it has not begun
        self.is_warmup = False
        self._search = rules.search
        self._candidates = candidates
        self.count = 0  # which warm-up or sample of its candidate it asks for, from 1
        self._times_asked: Counter[tuple[int, bool]] = Counter()
        with self._named_errors():
            self._flow = rules.strategy(range(candidates), n_warmup=rules.n_warmup, n_repeat=rules.n_repeat)
        if not hasattr(self._flow, "send"):
            raise FlowFailed(f"search={self._search}: returned {self._flow!r}, expected a generator")

    def resume(self, ms: float | None, banned: Container[int]) -> int | None:
        """Send the time of what was asked for (None: begin); return the winner, or None: it asks for more."""
        for _ in range(_ASKS_PER_CANDIDATE * self._candidates):
            try:
                with self._named_errors():
                    asked = next(self._flow) if ms is None else self._flow.send(ms)
            except StopIteration as stop:
                winner = self._checked(stop.value, "returned")
                return stop.value if isinstance(stop.value, Winner) else winner
            self.is_warmup = isinstance(asked, Warmup)
            self.index = self._checked(asked.index if isinstance(asked, Warmup) else asked, "asked for")
            self._times_asked[self.index, self.is_warmup] += 1
            self.count = self._times_asked[self.index, self.is_warmup]
            if self.index not in banned:
                return None
            ms = math.inf  # of what is banned, at once
        raise FlowFailed(f"search={self._search}: keeps asking for candidates that are banned")

    def _checked(self, index: Any, verb: str) -> int:
        with contextlib.suppress(TypeError):  # of what is no integer, numpy's among them
            if 0 <= operator.index(index) < self._candidates:
                return operator.index(index)
        raise FlowFailed(
            f"search={self._search}: {verb} {index!r}, which is none of {self._candidates} candidates"
        )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (StopIteration, TuningError):
            raise
        except Exception as error:
            raise FlowFailed(f"search={self._search}: {type(error).__name__}: {error}") from error
