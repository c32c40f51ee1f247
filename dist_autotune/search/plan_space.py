"""The plans that options and kernels make, by what each was seen to launch. No torch, no I/O, no clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from . import screening
from .context import Context
from .plan_trial import Plan

MOST_PLANS = 64  # of a race
MOST_CANDIDATES = {"kernel": 4, "thunk": 16}  # of a kernel, by objective
WITHIN = {"kernel": 1.05, "thunk": 1.5}  # of a kernel's fastest by launches
FIRST_CANDIDATES = 2  # of a kernel, while options are chosen
MOST_WIDER = 12  # of a kernel, when they have been ...
WIDER = 1.15  # ... within so much of its fastest by launches, beside the first options


class PlanSpace:
    """All plans that one search may race. `launched`: by choice and option, the contexts seen with it."""

    def __init__(
        self,
        contexts: Mapping[str, Context],
        objective: str,
        choices: list[str],
        launched: Mapping[tuple[str, int], frozenset[str]],
    ) -> None:
        self._objective = objective
        asked = [name for name in choices if any(name in seen for seen in launched.values())]
        self._contexts, self._choices, self._launched = contexts, asked, launched
        ever = frozenset().union(*launched.values()) if launched else None
        self._kernels = [
            c
            for c in contexts.values()
            if not c.is_choice and c.launch_ms and (ever is None or c.name in ever) and not c.is_decided
        ]

    def options_of(self, plan: Plan) -> Plan:
        return {name: index for name, index in plan.items() if self._contexts[name].is_choice}

    def wider(self, near: Iterable[tuple[float, Plan]]) -> list[Plan]:
        """Return plans of these options with more candidates of their kernels, the most promising first.

        What a plan promises is the time given with its options, times what its candidates take by launches
        over what the fastest take.
        """
        promised: list[tuple[float, Plan]] = []
        for options_ms, options in near:
            kernels = self._launched_by(options)
            most = MOST_WIDER if len(kernels) < 2 else FIRST_CANDIDATES
            shortlists = [kernel.shortlist(most, WIDER) for kernel in kernels]
            for candidates in itertools.islice(itertools.product(*shortlists), MOST_PLANS):
                slower = math.prod(
                    kernel.launch_ms.get(index, math.inf) / min(kernel.launch_ms.values())
                    for kernel, index in zip(kernels, candidates, strict=True)
                )
                chosen = {kernel.name: i for kernel, i in zip(kernels, candidates, strict=True)}
                promised.append((options_ms * slower, {**options, **chosen}))
        promised.sort(key=lambda promise: promise[0])
        return [plan for _, plan in promised]

    def plans(self, *, few: bool) -> list[Plan] | None:
        """Return all plans, that of the incumbents first; `few`: with few candidates of each kernel.

        With fewer, where those were too many plans; None: even then. That may be one where kernels are judged
        by their launches, else what is worth a screening.
        """
        most = FIRST_CANDIDATES if few else MOST_CANDIDATES[self._objective]
        least = 1 if self._objective == "kernel" else min(screening.MOST_LEVELS, most)
        for candidates in range(most, least - 1, -1):
            plans = list(itertools.islice(self._all(candidates), MOST_PLANS + 1))
            if len(plans) <= MOST_PLANS:
                return plans
        return None

    def levels(self) -> dict[str, dict[int, float]]:
        """Return the candidates of each context that could matter, with ms by their launches."""
        levels = {name: dict.fromkeys(self._options(name), 0.0) for name in self._choices}
        for kernel in self._kernels if self._objective == "thunk" else ():
            shortlist = kernel.shortlist(screening.MOST_LEVELS, WITHIN[self._objective])
            levels[kernel.name] = {index: kernel.launch_ms.get(index, 0.0) for index in shortlist}
        return levels

    def _all(self, most: int) -> Iterator[Plan]:
        known = set()
        for options in itertools.product(*(self._options(name) for name in self._choices)):
            combination = dict(zip(self._choices, options, strict=True))
            plan = {name: i for name, i in combination.items() if self._is_launched(name, combination)}
            key = tuple(plan.items())
            if key in known:
                continue
            known.add(key)
            yield from self._with_kernels(plan, most)

    def _with_kernels(self, options: Plan, most: int) -> Iterator[Plan]:
        """Yield the plans of these options with the best candidates of the kernels that they launch."""
        kernels = self._launched_by(options)
        shortlists = [kernel.shortlist(most, WITHIN[self._objective]) for kernel in kernels]
        for candidates in itertools.product(*shortlists):
            yield {**options, **{k.name: i for k, i in zip(kernels, candidates, strict=True)}}

    def _launched_by(self, options: Plan) -> list[Context]:
        return [kernel for kernel in self._kernels if self._is_launched(kernel.name, options)]

    def _options(self, name: str) -> list[int]:
        context = self._contexts[name]
        options = [index for index in range(len(context.digests)) if index not in context.banned]
        return sorted(options, key=lambda index: (index != context.incumbent, index))

    def _is_launched(self, name: str, combination: Plan) -> bool:
        """Return whether a context is launched under these options, as all choices that matter to it say."""
        for choice, index in combination.items():
            seen = {i: name in launched for (c, i), launched in self._launched.items() if c == choice}
            if choice != name and len(set(seen.values())) > 1 and not seen.get(index, False):
                return False
        return True
