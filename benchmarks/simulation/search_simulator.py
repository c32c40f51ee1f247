"""What a search costs and how good its picks are, under noise as it is on machines. No GPU needed.

    python -m benchmarks.simulation.search_simulator --sessions 400 --candidates 8 16 48 200

Protocol: candidates have true times drawn from 1 + gamma(1.2, 0.25); a sample of one rank is the true time
times lognormal jitter (2 %), a per-rank offset (1 %), a spike (3 % of samples, x1.5), the clock's drift
(x1.00 to x1.11, time constant 30 runs) and x1.3 in a candidate's first run. The time of a rank is the
median of its samples, ranks are reduced by max, as in a session. Reported over many sessions: runs, regret
of the pick (its true time over the best one), the chance of more than 1 % regret, and the chance that two
sessions on the same candidates pick differently.

Near ties: two equal candidates, 3 % ahead of the others; four within 0.3 %, eight within 0.5 %, 5 % ahead.

Traps: regret is of true times, not of measured ones; the drift favours whoever is measured early.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.options import new_parser
from dist_autotune.search.strategies import STRATEGIES, Strategy, Warmup

JITTER, RANK_OFFSET, SPIKE_CHANCE, SPIKE, DRIFT, DRIFT_RUNS, COLD = 0.02, 0.01, 0.03, 1.5, 0.11, 30.0, 1.3
NEAR_TIES_AMONG = 16  # candidates


@dataclass(frozen=True)
class Row:
    search: str
    landscape: str
    candidates: int
    ranks: int
    sessions: int
    runs_mean: float
    runs_p95: float
    runs_most: int
    regret_mean_percent: float
    regret_over_1_percent: float  # share of sessions
    flip_rate: float  # share of pairs of sessions on the same candidates with different winners


class Machine:
    """True times, and the noise of one session."""

    def __init__(self, true_ms: np.ndarray, ranks: int, random: np.random.Generator) -> None:
        self.true_ms, self._ranks, self._random = true_ms, ranks, random
        self._noise = np.empty((0, ranks))
        self._samples: dict[int, np.ndarray] = {}
        self._seen: set[int] = set()
        self.runs = 0

    def run(self, index: int, *, counts: bool) -> float:
        """Return the agreed time so far of a candidate after one more run."""
        if self.runs == len(self._noise):
            self._noise = np.concatenate([self._noise, self._more_noise(256)])
        sample = self.true_ms[index] * self._noise[self.runs] * (1.0 if index in self._seen else COLD)
        self._seen.add(index)
        self.runs += 1
        known = self._samples.get(index, np.empty((0, self._ranks)))
        samples = np.concatenate([known, sample[None]])
        if counts:
            self._samples[index] = samples
        in_order, middle = np.sort(samples, axis=0), len(samples) // 2
        medians = in_order[middle] if len(samples) % 2 else (in_order[middle] + in_order[middle - 1]) / 2
        return float(medians.max())

    def _more_noise(self, runs: int) -> np.ndarray:
        """Return the factors of the next runs, one for each rank."""
        random, shape = self._random, (runs, self._ranks)
        jitter = np.exp(random.normal(0, JITTER, shape))
        offset = 1 + RANK_OFFSET * random.normal(0, 1, shape).clip(-1, 1)
        spikes = np.where(random.random(shape) < SPIKE_CHANCE, SPIKE, 1.0)
        drift = 1 + DRIFT * (1 - np.exp(-(len(self._noise) + np.arange(runs)) / DRIFT_RUNS))
        return np.asarray(jitter * offset * spikes * drift[:, None])


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


def spread_out(random: np.random.Generator, candidates: int) -> np.ndarray:
    return np.asarray(1 + random.gamma(1.2, 0.25, candidates))


def near_ties(
    random: np.random.Generator, candidates: int, near: int, within: float, gap: float
) -> np.ndarray:
    """Return times of which `near` ones are `within` so much of each other, ahead of the others by a gap."""
    times = spread_out(random, candidates) + gap
    times[random.permutation(candidates)[:near]] = 1 + within * random.random(near)
    return np.asarray(times)


LANDSCAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "spread out": spread_out,
    "2 equal": lambda random, candidates: near_ties(random, candidates, 2, 0.0, 0.03),
    "4 within 0.3 %": lambda random, candidates: near_ties(random, candidates, 4, 0.003, 0.05),
    "8 within 0.5 %": lambda random, candidates: near_ties(random, candidates, 8, 0.005, 0.05),
}


def measure(
    name: str,
    n_warmup: int,
    n_repeat: int,
    candidates: int,
    ranks: int,
    sessions: int,
    seed: int,
    landscape: str,
) -> Row:
    random = np.random.default_rng([seed, candidates])
    runs: list[int] = []
    regrets: list[float] = []
    flips = 0
    for _ in range(sessions):
        times = LANDSCAPES[landscape](random, candidates)
        winners = []
        for _ in range(2):
            machine = Machine(times, ranks, random)
            winners.append(play(STRATEGIES[name], machine, n_warmup, n_repeat))
            runs.append(machine.runs)
            regrets.append(float(times[winners[-1]] / times.min() - 1))
        flips += winners[0] != winners[1]
    return Row(
        search=f"{name} {n_warmup}+{n_repeat}",
        landscape=landscape,
        candidates=candidates,
        ranks=ranks,
        sessions=sessions,
        runs_mean=round(statistics.fmean(runs), 1),
        runs_p95=float(np.quantile(runs, 0.95)),
        runs_most=max(runs),
        regret_mean_percent=round(100 * statistics.fmean(regrets), 3),
        regret_over_1_percent=round(100 * float(np.mean(np.array(regrets) > 0.01)), 2),
        flip_rate=round(flips / sessions, 3),
    )


def rows(candidates: list[int], ranks: int, sessions: int, seed: int) -> Iterator[Row]:
    searches = (("exhaustive", 3, 5), ("exhaustive", 1, 2), ("racing", 3, 5))
    for count in candidates:
        for name, n_warmup, n_repeat in searches:
            yield measure(name, n_warmup, n_repeat, count, ranks, sessions, seed, "spread out")
    for landscape in [*LANDSCAPES][1:]:
        for name, n_warmup, n_repeat in searches:
            yield measure(name, n_warmup, n_repeat, NEAR_TIES_AMONG, ranks, sessions, seed, landscape)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--candidates", type=int, nargs="*", default=[8, 16, 48, 200], help="how many")
    parser.add_argument("--ranks", type=int, default=8, help="of each session")
    parser.add_argument("--sessions", type=int, default=400, help="of each row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one row for each")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    found = []
    for seed in chosen.seeds:
        for row in rows(chosen.candidates, chosen.ranks, chosen.sessions, seed):
            found.append({**asdict(row), "seed": seed})
            print("  ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
