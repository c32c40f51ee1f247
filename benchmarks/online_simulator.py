"""How many steps `mode="online"` takes until all is settled, and what they cost a loop. No GPU needed.

Protocol: the tuner's own decisions (`protocol.Tuning`), fed with what a loop would tell. A step takes 10 ms
with the first candidates of its 12 kernels, which are half of that, in equal parts; each kernel has 16
candidates with times, jitter and spikes as in `search_simulator`. The device has so many steps in its queue,
two at most, as the tuner waits for it then: a sample is read that many steps later, and the host's clock goes
by the steps that the device ends meanwhile. Figures are means over sessions:

    settled after    steps
    first is best    the time of the first 1000 steps against never trying anything, where the first candidate
                     of each kernel is its best: nothing is gained, so this is what trials cost
    any              the same where the first is any of them: what trials cost less what they found by then
    dearest 20       the most that 20 steps in a row took longer than without trials, where the first is best

Traps: compiling is left out, and the tuner's work on the host (`online_overhead.py`). What trials cost is a
matter of how bad the candidates are: here their times are drawn from 1 + gamma(1.2, 0.25).

    python benchmarks/online_simulator.py --sessions 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from dist_autotune.search.messages import Announcement, Part, Payload, femtoseconds
from dist_autotune.search.rules import Rules
from dist_autotune.search.state import Tuning
from dist_autotune.search.strategies import STRATEGIES
from dist_autotune.timing.samples import READ_WITHIN_RUNS
from search_simulator import JITTER, SPIKE, SPIKE_CHANCE, spread_out

STEP_MS, KERNELS_PART, WINDOW_STEPS, MOST_STEPS = 10.0, 0.5, 1000, 200_000


@dataclass(frozen=True)
class Row:
    share: float
    queued_steps: int
    sessions: int
    settled_after: float
    settled_after_p95: float
    first_is_best_percent: float
    any_first_percent: float
    dearest_20_percent: float


@dataclass
class Kernel:
    """One kernel of the step: its true times, and the sample that the device still has to make."""

    name: str
    true_ms: np.ndarray
    samples: dict[int, list[float]]
    on_its_way: tuple[int, int, float] | None = None  # (the step that launched it, candidate, ms)

    @property
    def order(self) -> tuple[tuple[str, str], ...]:
        return tuple((str(index), str(index)) for index in range(len(self.true_ms)))


class Loop:
    """A training loop of one rank."""

    def __init__(
        self, share: float, queued_steps: int, times: list[np.ndarray], random: np.random.Generator
    ) -> None:
        self._random, self._queued_steps = random, queued_steps
        strategy = STRATEGIES["racing"]
        rules = Rules(strategy, "racing", 3, 5, "max", mode="online", online_share=share)
        self.tuning = Tuning(rules)
        self.tuning.open()
        base_ms = STEP_MS * KERNELS_PART / len(times)
        self._kernels = [
            Kernel(f"kernel {number:02}", base_ms * each / each[0], {}) for number, each in enumerate(times)
        ]
        self._in_queue_ms: deque[float] = deque([STEP_MS] * queued_steps)
        self._host_ms = 0.0

    def step(self) -> float:
        """Make a step; return what it takes on the device."""
        took_ms, parts = STEP_MS * (1 - KERNELS_PART), {}
        for kernel in self._kernels:
            context = self.tuning.contexts.get(kernel.name)
            candidate = 0 if context is None else context.planned
            took_ms += float(kernel.true_ms[candidate])
            parts[kernel.name] = self._told(kernel, candidate)
        self._in_queue_ms.append(took_ms)
        self._host_ms += self._in_queue_ms.popleft()
        self.tuning.step(Payload("run", parts=parts, elapsed_s=self._host_ms / 1e3))
        return took_ms

    @property
    def is_settled(self) -> bool:
        return not any(self.tuning.contexts.unsettled)

    def _told(self, kernel: Kernel, candidate: int) -> Part:
        context, run = self.tuning.contexts.get(kernel.name), self.tuning.runs
        if kernel.on_its_way is None and (context is None or context.is_on_trial):
            noise = float(np.exp(self._random.normal(0, JITTER)))
            noise *= SPIKE if self._random.random() < SPIKE_CHANCE else 1.0
            kernel.on_its_way = (run, candidate, noise * float(kernel.true_ms[candidate]))
        part = Part(ran=str(candidate))
        if kernel.on_its_way is not None:
            launched_in, candidate, ms = kernel.on_its_way
            part = Part(ran=str(candidate), pending=1)
            if run >= launched_in + self._queued_steps:
                part = self._read(kernel, candidate, ms, counts=context is None or not context.is_warmup)
        if context is None:
            digests = tuple(digest for digest, _ in kernel.order)
            part = replace(part, announcement=Announcement(0, kernel.name, "", kernel.order, digests))
        return part

    @staticmethod
    def _read(kernel: Kernel, candidate: int, ms: float, *, counts: bool) -> Part:
        kernel.on_its_way = None
        samples = [*kernel.samples.get(candidate, []), ms]
        if counts:
            kernel.samples[candidate] = samples
        so_far = statistics.median(samples)
        total_fs = femtoseconds(so_far)
        return Part(ran=str(candidate), worst_ms=so_far, best_ms=so_far, total_fs=total_fs, measured=1)


def play(
    share: float, queued_steps: int, times: list[np.ndarray], random: np.random.Generator
) -> tuple[int, list[float]]:
    """Return after how many steps all was settled, and what each step took, of a window at least."""
    loop = Loop(share, queued_steps, times, random)
    settled_after, took_ms = 0, []
    while not settled_after or len(took_ms) < WINDOW_STEPS:
        took_ms.append(loop.step())
        assert len(took_ms) < MOST_STEPS, "not settled"
        if not settled_after and loop.is_settled:
            settled_after = len(took_ms)
    return settled_after, took_ms


def over_percent(took_ms: list[float]) -> float:
    return 100 * (statistics.fmean(took_ms) / STEP_MS - 1)


def measure(share: float, queued_steps: int, kernels: int, candidates: int, sessions: int) -> Row:
    settled, best_first, any_first, dearest = [], [], [], []
    for seed in range(sessions):
        random = np.random.default_rng([seed, kernels, candidates])
        times = [spread_out(random, candidates) for _ in range(kernels)]
        settled_after, took_ms = play(share, queued_steps, times, random)
        settled.append(settled_after)
        any_first.append(over_percent(took_ms[:WINDOW_STEPS]))
        _, took_ms = play(share, queued_steps, [np.sort(each) for each in times], random)
        best_first.append(over_percent(took_ms[:WINDOW_STEPS]))
        dearest.append(max(over_percent(took_ms[first : first + 20]) for first in range(len(took_ms) - 20)))
    return Row(
        share=share,
        queued_steps=queued_steps,
        sessions=sessions,
        settled_after=round(statistics.fmean(settled), 0),
        settled_after_p95=float(np.quantile(settled, 0.95)),
        first_is_best_percent=round(statistics.fmean(best_first), 2),
        any_first_percent=round(statistics.fmean(any_first), 2),
        dearest_20_percent=round(statistics.fmean(dearest), 2),
    )


def rows(
    shares: list[float], queues: list[int], kernels: int, candidates: int, sessions: int
) -> Iterator[Row]:
    for queued_steps in queues:
        for share in shares:
            yield measure(share, queued_steps, kernels, candidates, sessions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.2, 0.1, 0.05])
    parser.add_argument("--queues", type=int, nargs="+", choices=range(READ_WITHIN_RUNS + 1), default=[0, 2])
    parser.add_argument("--kernels", type=int, default=12)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    print(f"{chosen.kernels} kernels x {chosen.candidates} candidates, {chosen.sessions} sessions a row")
    print(
        f"{'queued':>6} {'share':>6} {'settled after':>13} {'p95':>7} {'first is best':>13} {'any':>7} "
        f"{'dearest 20':>10}"
    )
    found = []
    for row in rows(chosen.shares, chosen.queues, chosen.kernels, chosen.candidates, chosen.sessions):
        found.append(asdict(row))
        print(
            f"{row.queued_steps:6} {row.share:6.2f} {row.settled_after:13.0f} {row.settled_after_p95:7.0f} "
            f"{row.first_is_best_percent:+11.2f} % {row.any_first_percent:+5.1f} % "
            f"{row.dearest_20_percent:+8.1f} %",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
