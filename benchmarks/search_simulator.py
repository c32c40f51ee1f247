"""What a search costs and how good its picks are, under noise as it is on machines. No GPU needed.

Protocol: candidates have true times drawn from 1 + gamma(1.2, 0.25); a sample of one rank is the true time
times lognormal jitter (2 %), a per-rank offset (1 %), a spike (3 % of samples, x1.5), the clock's drift
(x1.00 to x1.11, time constant 30 runs) and x1.3 in a candidate's first run. The statistic of a rank is the
median of its samples, ranks are reduced by max, as in a session. Reported over many sessions: runs, regret
of the pick (its true time over the best one), the chance of more than 1 % regret, and the chance that two
sessions on the same candidates pick differently.

Traps: regret is of true times, not of measured ones; the drift favours whoever is measured early.

    python benchmarks/search_simulator.py --sessions 400 --candidates 8 16 48 200
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dist_autotune.flows import STRATEGIES, Strategy, Warmup

JITTER, RANK_OFFSET, SPIKE_CHANCE, SPIKE, DRIFT, DRIFT_RUNS, COLD = 0.02, 0.01, 0.03, 1.5, 0.11, 30.0, 1.3


@dataclass(frozen=True)
class Row:
    search: str
    candidates: int
    ranks: int
    sessions: int
    runs_mean: float
    runs_p95: float
    regret_mean_percent: float
    regret_over_1_percent: float  # share of sessions
    flip_rate: float  # share of pairs of sessions on the same candidates with different winners


class Machine:
    """True times, and the noise of one session."""

    def __init__(self, true_ms: np.ndarray, ranks: int, random: np.random.Generator) -> None:
        self.true_ms, self._ranks, self._random = true_ms, ranks, random
        self._samples: dict[int, list[np.ndarray]] = {}
        self._seen: set[int] = set()
        self.runs = 0

    def run(self, index: int, *, counts: bool) -> float:
        """Return the agreed time so far of a candidate after one more run."""
        random, ranks = self._random, self._ranks
        drift = 1 + DRIFT * (1 - math.exp(-self.runs / DRIFT_RUNS))
        jitter = np.exp(random.normal(0, JITTER, ranks))
        offset = 1 + RANK_OFFSET * random.normal(0, 1, ranks).clip(-1, 1)
        spikes = np.where(random.random(ranks) < SPIKE_CHANCE, SPIKE, 1.0)
        cold = 1.0 if index in self._seen else COLD
        sample = self.true_ms[index] * drift * jitter * offset * spikes * cold
        self._seen.add(index)
        self.runs += 1
        samples = [*self._samples.get(index, []), sample]
        if counts:
            self._samples[index] = samples
        return float(np.median(np.array(samples), axis=0).max())


def play(strategy: Strategy, machine: Machine, n_warmup: int, n_repeat: int) -> int:
    """Drive one flow to its end; return the winner."""
    flow = strategy(range(len(machine.true_ms)), n_warmup=n_warmup, n_repeat=n_repeat)
    asked = next(flow)
    while True:
        is_warmup = isinstance(asked, Warmup)
        ms = machine.run(asked.index if isinstance(asked, Warmup) else asked, counts=not is_warmup)
        try:
            asked = flow.send(ms)
        except StopIteration as stop:
            return int(stop.value)


def measure(name: str, n_warmup: int, n_repeat: int, candidates: int, ranks: int, sessions: int) -> Row:
    random = np.random.default_rng(candidates)
    runs: list[int] = []
    regrets: list[float] = []
    flips = 0
    for _ in range(sessions):
        times = np.sort(1 + random.gamma(1.2, 0.25, candidates))[random.permutation(candidates)]
        winners = []
        for _ in range(2):
            machine = Machine(times, ranks, random)
            winners.append(play(STRATEGIES[name], machine, n_warmup, n_repeat))
            runs.append(machine.runs)
            regrets.append(float(times[winners[-1]] / times.min() - 1))
        flips += winners[0] != winners[1]
    return Row(
        search=f"{name} {n_warmup}+{n_repeat}",
        candidates=candidates,
        ranks=ranks,
        sessions=sessions,
        runs_mean=round(statistics.fmean(runs), 1),
        runs_p95=float(np.quantile(runs, 0.95)),
        regret_mean_percent=round(100 * statistics.fmean(regrets), 3),
        regret_over_1_percent=round(100 * float(np.mean(np.array(regrets) > 0.01)), 2),
        flip_rate=round(flips / sessions, 3),
    )


def rows(candidates: list[int], ranks: int, sessions: int) -> Iterator[Row]:
    for count in candidates:
        for name, n_warmup, n_repeat in (("exhaustive", 3, 5), ("exhaustive", 1, 2), ("racing", 3, 5)):
            yield measure(name, n_warmup, n_repeat, count, ranks, sessions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, nargs="+", default=[8, 16, 48, 200])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = []
    print(f"{'candidates':>10} {'search':16} {'runs':>7} {'p95':>6} {'regret %':>9} {'>1 %':>6} {'flips':>6}")
    for row in rows(chosen.candidates, chosen.ranks, chosen.sessions):
        found.append(asdict(row))
        print(
            f"{row.candidates:10} {row.search:16} {row.runs_mean:7.1f} {row.runs_p95:6.0f} "
            f"{row.regret_mean_percent:9.3f} {row.regret_over_1_percent:6.2f} {row.flip_rate:6.3f}",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
