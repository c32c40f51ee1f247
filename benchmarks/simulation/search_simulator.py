"""What a search costs and how good its picks are, under noise as it is on machines. No GPU needed.

    python -m benchmarks.simulation.search_simulator --sessions 400 --candidates 8 16 48 200
    python -m benchmarks.simulation.search_simulator --ties --steps --sessions 60

Protocol: candidates have true times drawn from 1 + gamma(1.2, 0.25); a sample of one rank is the true time
times lognormal jitter (2 %), a per-rank offset (1 %), a spike (3 % of samples, x1.5), the clock's drift
(x1.00 to x1.11, time constant 30 runs) and x1.3 in a candidate's first run. The time of a rank is the
median of its samples, ranks are reduced by max, as in a session. Reported over many sessions: runs, regret
of the pick (its true time over the best one), the chance of more than 1 % regret, and the chance that two
sessions on the same candidates pick differently.

Near ties: two equal candidates, 3 % ahead of the others; four within 0.3 %, eight within 0.5 %, 5 % ahead.

The same near tie again and again (`--ties`): the share of sessions that end with the commonest winner. Whole
steps (`--steps`: `simulated_steps`): runs and regret of objective="thunk" where configs act on each other.

Traps: regret is of true times, not of measured ones; the drift favours whoever is measured early.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.common.options import new_parser
from benchmarks.simulation.simulated_steps import STEPS, settle
from dist_autotune.search.strategies import STRATEGIES, Strategy, Warmup

JITTER, RANK_OFFSET, SPIKE_CHANCE, SPIKE, DRIFT, DRIFT_RUNS, COLD = 0.02, 0.01, 0.03, 1.5, 0.11, 30.0, 1.3
NEAR_TIES_AMONG = 16  # candidates
TIES = ((1.000, 0.999), (1.000, 0.995, 0.998, 0.996), (1.3, 1.000, 1.2, 0.999, 1.5, 0.997))  # ms
STEP_SESSIONS = 5  # a step takes seconds


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


@dataclass(frozen=True)
class TieRow:
    ms: tuple[float, ...]
    ranks: int
    sessions: int
    runs_mean: float
    commonest_percent: float  # of the sessions end with the same winner
    regret_most_percent: float


@dataclass(frozen=True)
class StepRow:
    step: str
    sessions: int
    runs_mean: float
    runs_most: int
    regret_mean_percent: float
    regret_most_percent: float


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


def rows(candidates: list[int], ranks: int, sessions: int, seed: int, *, every: bool) -> Iterator[Row]:
    searches = [("exhaustive", 3, 5), ("exhaustive", 1, 2)] if every else []
    for count in candidates:
        for name, n_warmup, n_repeat in (*searches, ("racing", 3, 5)):
            yield measure(name, n_warmup, n_repeat, count, ranks, sessions, seed, "spread out")
    for landscape in [*LANDSCAPES][1:]:
        for name, n_warmup, n_repeat in (*searches, ("racing", 3, 5)):
            yield measure(name, n_warmup, n_repeat, NEAR_TIES_AMONG, ranks, sessions, seed, landscape)


def tie_rows(ranks: int, sessions: int, seed: int) -> Iterator[TieRow]:
    for ms in TIES:
        random, times = np.random.default_rng([seed, len(ms)]), np.array(ms)
        runs: list[int] = []
        winners: Counter[int] = Counter()
        for _ in range(sessions):
            machine = Machine(times, ranks, random)
            winners[play(STRATEGIES["racing"], machine, 3, 5)] += 1
            runs.append(machine.runs)
        yield TieRow(
            ms=ms,
            ranks=ranks,
            sessions=sessions,
            runs_mean=round(statistics.fmean(runs), 1),
            commonest_percent=round(100 * winners.most_common(1)[0][1] / sessions, 1),
            regret_most_percent=round(100 * max(ms[index] / min(ms) - 1 for index in winners), 2),
        )


def step_rows(sessions: int, seed: int) -> Iterator[StepRow]:
    for name, make in STEPS.items():
        found = [settle(make(Random(f"{seed} {k}")), Random(f"noise {seed} {k}")) for k in range(sessions)]
        regrets = [100 * settled.regret for settled in found]
        yield StepRow(
            step=name,
            sessions=sessions,
            runs_mean=round(statistics.fmean(settled.runs for settled in found), 1),
            runs_most=max(settled.runs for settled in found),
            regret_mean_percent=round(statistics.fmean(regrets), 2),
            regret_most_percent=round(max(regrets), 2),
        )


def show(chosen: argparse.Namespace) -> list[dict[str, object]]:
    """Print the tables of ties and of steps that are asked for, and return their rows."""
    found: list[TieRow | StepRow] = []
    for seed in chosen.seeds if chosen.ties else []:
        for tie in tie_rows(chosen.ranks, chosen.sessions, seed):
            found.append(tie)
            times = ", ".join(f"{ms:.3f}" for ms in tie.ms)
            print(
                f"{times}: the same winner in {tie.commonest_percent:.1f} % of {tie.sessions} sessions, "
                f"{tie.runs_mean:.1f} runs, regret at most {tie.regret_most_percent:.2f} %",
                flush=True,
            )
    for seed in chosen.seeds if chosen.steps else []:
        for step in step_rows(min(chosen.sessions, STEP_SESSIONS), seed):
            found.append(step)
            print(
                f"{step.step}: {step.runs_mean:.0f} runs, at most {step.runs_most}; regret "
                f"{step.regret_mean_percent:.2f} %, at most {step.regret_most_percent:.2f} % "
                f"({step.sessions} sessions)",
                flush=True,
            )
    return [asdict(row) for row in found]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--candidates", type=int, nargs="*", default=[8, 16, 48, 200], help="how many")
    parser.add_argument("--ranks", type=int, default=8, help="of each session")
    parser.add_argument("--sessions", type=int, default=400, help="of each row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one row for each")
    parser.add_argument("--racing-only", action="store_true", help="no other search")
    parser.add_argument("--ties", action="store_true", help="near ties again and again, instead")
    parser.add_argument("--steps", action="store_true", help="whole steps, instead")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    if chosen.ties or chosen.steps:
        found = show(chosen)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    found = []
    print(
        f"{'landscape':>16} {'candidates':>10} {'search':16} {'seed':>4} {'runs':>7} {'p95':>6} {'most':>5} "
        f"{'regret %':>9} {'>1 %':>6} {'flips':>6}"
    )
    for seed in chosen.seeds:
        for row in rows(chosen.candidates, chosen.ranks, chosen.sessions, seed, every=not chosen.racing_only):
            found.append({**asdict(row), "seed": seed})
            print(
                f"{row.landscape:>16} {row.candidates:10} {row.search:16} {seed:4} {row.runs_mean:7.1f} "
                f"{row.runs_p95:6.0f} {row.runs_most:5} {row.regret_mean_percent:9.3f} "
                f"{row.regret_over_1_percent:6.2f} {row.flip_rate:6.3f}",
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
