"""All ranks of a session in one object, without a kernel or a process: what they tell makes the next plan."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dist_autotune.search.messages import Announcement, Bits, Part, RunReport
from dist_autotune.search.reports import agreed_run
from dist_autotune.search.rules import BY_LAUNCH, Rules
from dist_autotune.search.state import SearchState
from dist_autotune.search.strategies import STRATEGIES, exhaustive

Ms = Mapping[str, float] | Callable[[str, int], float]


def rules(**options: Any) -> Rules:
    chosen = {"search": "exhaustive", "n_warmup": 0, "n_repeat": 1, **options}
    return Rules(**{"strategy": STRATEGIES.get(chosen["search"], exhaustive), **chosen})


class Simulation:
    """All ranks at once: each launches what is planned and tells its own median.

    `contexts` are the candidates of each, in the order of first launch; `ms` maps candidates to a time,
    for all ranks or by rank. The whole run takes the sum of its launches, and `run_ms(plan)` more.
    """

    def __init__(
        self,
        contexts: Mapping[str, Sequence[str]],
        ms: Ms,
        *,
        ranks: int = 1,
        choices: Collection[str] = (),
        run_ms: Callable[[dict[str, str]], float] = lambda plan: 0.0,
        launches: Callable[[int, int, str], bool] = lambda run, rank, name: True,
        bans: Callable[[int, int, str], dict[str, str]] = lambda run, rank, name: {},
        compiling: Callable[[int, int, str], int] = lambda run, rank, name: 0,
        outputs: Callable[[dict[str, str], int], str] = lambda plan, rank: "",
        second: float = 0.0,
        **options: Any,
    ) -> None:
        self.contexts = contexts
        self.ms = ms
        self.ranks = ranks
        self.choices = choices
        self.run_ms = run_ms
        self.launches = launches
        self.bans = bans
        self.compiling = compiling
        self.outputs = outputs  # what a rank's outputs are under a plan, where bits are compared
        self.second = second  # what each run takes of the budget
        self.tuning = SearchState(rules(**options))
        self.plans: list[dict[str, str]] = []  # of each run: context -> candidate launched
        self._announced: set[tuple[int, str]] = set()
        self._samples: dict[Any, list[float]] = {}
        self._began = 0

    def session(self, runs_at_most: int = 500) -> list[dict[str, str]]:
        """Run until the session is over; return the plans of its runs."""
        self.tuning.open()
        self._began = len(self.plans)
        while not self.tuning.done:
            self.run()
            assert len(self.plans) - self._began < runs_at_most, "the session does not end"
        return self.plans[self._began :]

    def run(self) -> None:
        run = len(self.plans) - self._began
        judged = self.tuning.judged_run
        reports = {rank: self._report(run, rank, judged) for rank in range(self.ranks)}
        self.plans.append(self._planned(run))
        self.tuning.step(agreed_run(reports, {}, self.tuning.known))

    def winners(self) -> dict[str, str]:
        return {name: c.digests[c.incumbent] for name, c in self.tuning.contexts.items()}

    def statuses(self) -> dict[str, str]:
        return {name: context.status for name, context in self.tuning.contexts.items()}

    def _planned(self, run: int) -> dict[str, str]:
        return {
            name: self._candidate(name)
            for name in self.contexts
            if any(self.launches(run, rank, name) for rank in range(self.ranks))
        }

    def _candidate(self, name: str) -> str:
        context = self.tuning.contexts.get(name)
        return self.contexts[name][0] if context is None else context.digests[context.planned]

    def _report(self, run: int, rank: int, judged: tuple[str, str] | None) -> RunReport:
        names = [name for name in self.contexts if self.launches(run, rank, name)]
        plan = {name: self._candidate(name) for name in names}
        whole = Part()
        if judged is not None:
            whole = Part("|".join(judged), **self._times(self._whole_ms(plan, rank), ("run", rank, judged)))
        parts = {name: self._part(run, rank, name, plan[name]) for name in names}
        for name in self.contexts:
            if (left := self.compiling(run, rank, name)) and (rank, name) in self._announced:
                parts[name] = replace(parts.get(name, Part()), compiling=left)
        elapsed_s = self.second * (run + 1)
        bits = None
        if self.tuning.compares_outputs:
            text = hashlib.blake2b(f"{rank} {self.outputs(plan, rank)}".encode(), digest_size=16).hexdigest()
            bits = Bits(text, tensors=1)
        return RunReport(parts=parts, run=whole, bits=bits, elapsed_s=elapsed_s, step_s=self.second)

    def _part(self, run: int, rank: int, name: str, candidate: str) -> Part:
        announcement = None
        if (rank, name) not in self._announced:
            self._announced.add((rank, name))
            order = tuple((c, c) for c in self.contexts[name])
            announcement = Announcement(
                rank,
                self._family(name),
                self._key(name),
                order,
                tuple(sorted(self.contexts[name])),
                is_choice=name in self.choices,
                kernel_id=self._family(name),
                place=list(self.contexts).index(name),
                fills=self._fills(name),
            )
        context = self.tuning.contexts.get(name)
        times: dict[str, Any] = {}
        on_trial = context is None or (context.judge == BY_LAUNCH and context.trial is not None)
        if on_trial and name not in self.choices and not (context is not None and context.search.is_warmup):
            ms = self._launch_ms(name, candidate, rank)
            times = self._times(ms, (name, rank, candidate))
        bans = self.bans(run, rank, name)
        share = self._share(name, candidate)
        return Part(candidate, bans=bans, announcement=announcement, share=share, **times)

    def _times(self, ms: float, where: Any) -> dict[str, Any]:
        samples = self._samples.setdefault(where, [])
        samples.append(ms)
        return {"ms": statistics.median(samples)}

    def _whole_ms(self, plan: dict[str, str], rank: int) -> float:
        took = sum(self._launch_ms(n, c, rank) for n, c in plan.items() if n not in self.choices)
        return took + self.run_ms(plan)

    def _fills(self, name: str) -> tuple[float, ...]:
        """Return how much of the SMs' time a context's launches fill, by candidate; (): it is not known."""
        return ()

    def _family(self, name: str) -> str:
        """Return the name of a context's kernel."""
        return name

    def _key(self, name: str) -> str:
        return "k"

    def _share(self, name: str, candidate: str) -> int:
        """Return the thousandths of the device that a candidate holds; 0: not known."""
        return 0

    def _launch_ms(self, name: str, candidate: str, rank: int) -> float:
        return self._ms(candidate, rank)

    def _ms(self, candidate: str, rank: int) -> float:
        return self.ms(candidate, rank) if callable(self.ms) else self.ms[candidate]


def columns(plans: Sequence[Mapping[str, str]], name: str) -> list[str | None]:
    return [plan.get(name) for plan in plans]
