"""What appears in a run is compiled and loaded right after it, before any of it is tried."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ..compilation import preflight as compiling
from ..compilation.pool import Tally, Terms
from .rank_context import Binding, Local
from .rank_contexts import LocalContexts


class NewCandidates:
    """The candidates of the contexts that appeared in the run under way, on this rank.

    loading: entered around the loading of each.
    """

    def __init__(
        self, contexts: LocalContexts, loading: Callable[[Local, str], AbstractContextManager[None]]
    ) -> None:
        self._contexts = contexts
        self._loading = loading
        # The first launches of the contexts: arguments are held no longer than the run.
        self._launches: list[tuple[Binding, tuple[Any, ...], dict[str, Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._launches)

    def add(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the first launch of a context."""
        self._launches.append((binding, args, kwargs))

    def clear(self) -> None:
        """Forget them: the run raised."""
        self._launches.clear()

    def preflight(self, terms: Terms) -> Iterator[tuple[Local, Tally]]:
        """Compile and load them, ban what fails, and yield how it went, context by context."""
        launches, self._launches = self._launches, []
        for binding, args, kwargs in launches:
            tuner, local = binding.tuner(), binding.local
            if tuner is None or local.announced:
                continue
            tried = {local.choice, *local.bans}
            untried = {digest: config for digest, config in binding.configs.items() if digest not in tried}
            loading = functools.partial(self._loading, local)
            found = compiling.preflight(tuner, untried, args, kwargs, terms, loading)
            if found.tally is not None:
                yield local, found.tally
            for candidate, reason in found.reasons.items():
                self._contexts.ban(local, candidate, reason)
