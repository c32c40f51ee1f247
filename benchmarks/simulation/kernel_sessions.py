"""Sessions of one rank in virtual time, over kernels whose times are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.simulation.protocol_simulation import Simulation
from benchmarks.simulation.recorded_tables import Kernel


class KernelSession(Simulation):
    """Kernels are all met in the first run, or one after another; compilers go on behind the runs.

    rate: candidates compiled in a run. noise: of a sample. spikes: how often one is 1.5 times as long.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        seed: int,
        rate: float = math.inf,
        *,
        noise: float = 0.02,
        spikes: float = 0.03,
        **options: Any,
    ) -> None:
        self.kernels = {f"{each.kernel} {each.key}": each for each in kernels}
        self.compiled, self._rate, self._room = 0, rate, 0.0
        self._random, self._noise, self._spikes = random.Random(seed), noise, spikes
        self._left: dict[str, list[str]] = {}
        self._asked: dict[str, set[str]] = {}  # candidates that were given to the compilers
        texts = {name: [*each.ms] for name, each in self.kernels.items()}
        options = {"search": "expected", **options}
        super().__init__(texts, {}, compiling=self._compiling, **options)

    def run(self) -> None:
        self._room = min(self._room, 1.0) + self._rate
        for name, context in self.tuning.contexts.items():
            outside = context.search.outside_indices
            wanted = {d for i, d in enumerate(context.digests) if i and i not in outside}
            self._left.setdefault(name, []).extend(sorted(wanted - self._asked.setdefault(name, set())))
            self._asked[name] |= wanted
        for left in self._left.values():
            while left and self._room >= 1:
                left.pop()
                self._room, self.compiled = self._room - 1, self.compiled + 1
        super().run()

    def one_after_another(self) -> list[int]:
        """Tune each key in a session of its own; return how many of its candidates were launched."""
        for now in self.contexts:
            self.launches = lambda run, rank, name, now=now: name == now
            self.session()
        return [len({plan[name] for plan in self.plans if name in plan}) for name in self.contexts]

    def regrets(self) -> list[float]:
        winners = self.winners()
        return [each.ms[winners[name]] / min(each.ms.values()) - 1 for name, each in self.kernels.items()]

    def _compiling(self, run: int, rank: int, name: str) -> int:
        return len(self._left.get(name, ()))

    def _fills(self, name: str) -> tuple[float, ...]:
        fills = self.kernels[name].fills
        return tuple(fills[text] for text in self.contexts[name]) if fills else ()

    def _family(self, name: str) -> str:
        return self.kernels[name].kernel

    def _key(self, name: str) -> str:
        return self.kernels[name].key

    def _launch_ms(self, name: str, candidate: str, rank: int) -> float:
        spike = 1.5 if self._random.random() < self._spikes else 1.0
        return self.kernels[name].ms[candidate] * spike * self._random.lognormvariate(0, self._noise)
