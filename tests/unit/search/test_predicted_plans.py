"""A product behind a gather, beside three choices: what predicted plans cost and lose."""

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator

import pytest
from flows import driven

from benchmarks.simulation.protocol_simulation import Simulation
from dist_autotune.search.phases import race_runs
from dist_autotune.search.plans import predicted
from dist_autotune.search.plans.space import PlanSpace, levels_of
from dist_autotune.search.strategies import AgreedMs

RUNS_AT_MOST = 400
SMS = 132
SHAPES = [(8192, 1792, 4096), (5120, 1280, 8192), (6144, 5120, 7168), (4096, 1024, 8192), (8000, 6400, 5120)]
TILES = {  # of a program: rows and columns, and how fast it is beside the largest
    "specialized": {(128, 256): 1.0, (256, 192): 1.03, (128, 192): 0.97, (128, 128): 0.95, (64, 256): 0.93},
    "plain": {(128, 256): 0.95, (256, 128): 0.92, (128, 128): 0.9, (64, 256): 0.85, (64, 128): 0.75},
}


class GatheredProduct(Simulation):
    """A product behind a gather in virtual time, with the choices of `AllGatherGemm`, on two ranks.

    Half of the rows are there, the others come in pieces, one after the other. A persistent kernel's programs
    take tiles in that order, and wait for the piece of a tile. So which tile is best depends on the pieces.
    """

    def __init__(self, seed: int) -> None:
        self._random = rng = random.Random(seed)
        self.shape = SHAPES[seed % len(SHAPES)]
        self._steps: dict[tuple[str, ...], float] = {}
        self._flops = rng.uniform(700e9, 780e9) / SMS  # of an SM in a ms
        self._bytes = rng.uniform(280e6, 390e6)  # of the gather in a ms
        self.kernels = {name: dict(self._configs(tiles)) for name, tiles in TILES.items()}
        contexts: dict[str, list[str]] = {
            "consumer": [*self.kernels],
            "pieces": ["1", "2", "4"],
            "programs": ["128", "132", "116"],
            **{name: [*configs] for name, configs in self.kernels.items()},
        }
        choices = ("consumer", "pieces", "programs")
        super().__init__(contexts, {}, ranks=2, choices=choices, launches=self._is_launched, search="racing")

    def _configs(self, tiles: dict[tuple[int, int], float]) -> Iterator[tuple[str, tuple[int, int, float]]]:
        """Yield each tile in three configs that are nearly as fast, the largest tile first."""
        for (rows, columns), speed in tiles.items():
            speed *= self._random.gauss(1, 0.02)
            for group in (8, 16, 4):
                text = f"BLOCK_M: {rows}, BLOCK_N: {columns}, GROUP_M: {group}"
                yield text, (rows, columns, speed * self._random.gauss(1, 0.005))

    def _is_launched(self, run: int, rank: int, name: str) -> bool:
        consumer = self._candidate("consumer")
        return name not in self.kernels or name == consumer

    def step_ms(self, plan: dict[str, str]) -> float:
        consumer = plan["consumer"]
        launched = consumer, plan["pieces"], plan["programs"], plan[consumer]
        if launched not in self._steps:
            self._steps[launched] = self._step_ms(*launched)
        return self._steps[launched]

    def _step_ms(self, consumer: str, pieces_text: str, programs: str, config: str) -> float:
        m, n, k = self.shape
        pieces = int(pieces_text)
        come_ms = [0.01 + (i + 1) * (m // 2 * k * 2 / self._bytes / pieces + 0.003) for i in range(pieces)]
        rows, columns, speed = self.kernels[consumer][config]
        tile_ms = 2 * rows * columns * k / self._flops / speed + 0.002
        begin_ms = [0.0] * math.ceil(m / 2 / rows)
        begin_ms += [
            come_ms[math.ceil(min(end, m // 2) * pieces / (m // 2)) - 1]
            for end in range(rows, m // 2 + rows, rows)
        ]
        free_ms = [0.0] * int(programs)
        for tile in range(len(begin_ms) * math.ceil(n / columns)):
            program, row = tile % len(free_ms), tile // math.ceil(n / columns)
            free_ms[program] = max(free_ms[program], begin_ms[row]) + tile_ms
        return max(free_ms) + 0.006

    def best_ms(self) -> float:
        options = itertools.product(*(self.contexts[name] for name in ("pieces", "programs")))
        return min(
            self.step_ms({"consumer": consumer, consumer: config, "pieces": pieces, "programs": programs})
            for pieces, programs in options
            for consumer, configs in self.kernels.items()
            for config in configs
        )

    def _whole_ms(self, plan: dict[str, str], rank: int) -> float:
        drift = 1 + 0.11 * (1 - math.exp(-len(self.plans) / 30))
        spike = 1.5 if self._random.random() < 0.03 else 1.0
        return self.step_ms(plan) * drift * spike * self._random.lognormvariate(0, 0.02)

    def _launch_ms(self, name: str, candidate: str, rank: int) -> float:
        return self._whole_ms(
            {each: self._candidate(each) for each in self.contexts} | {name: candidate}, rank
        )

    def _share(self, name: str, candidate: str) -> int:
        """Of programs with the smallest tile two fit on an SM: the kernel's candidates hold two shares."""
        if name not in self.kernels:
            return 0
        rows, columns, _ = self.kernels[name][candidate]
        fitting = 2 if rows * columns <= 64 * 128 else 1
        return round(1000 * int(self._candidate("programs")) / SMS / fitting)


def space_of(ms: dict[int, float], options: int, texts: list[str]) -> PlanSpace:
    """Return a space of one kernel, whose candidates take these ms alone, and a choice of so many options."""
    launched = {("c", option): frozenset(["c", "k"]) for option in range(options)}
    texts_of = {"c": [*map(str, range(options))], "k": texts}
    return PlanSpace([levels_of("k", ms, {}, incumbent=0)], {"c": range(options)}, launched, texts_of)


def options_of_one_kernel() -> PlanSpace:
    return space_of(dict.fromkeys(range(16), 1.0), 20, [f"B: {i}" for i in range(16)])


@pytest.mark.parametrize("ms", [math.nan, AgreedMs(1.0, 0.0), 1.0])
def test_plans_of_which_nothing_is_known_race_in_no_more_runs_than_are_planned(ms):
    """All 320 raced, in 642 runs, where the host hid what the first run takes."""
    space = options_of_one_kernel()
    plans = predicted.plans_of(space)
    assert len(plans) == 320
    asked, winner = driven(predicted.fastest_predicted_plan(space, plans), lambda _: ms)
    assert winner == {"c": 0, "k": 0}
    assert len(asked) <= race_runs.runs_at_most({"c": 20}, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_host_that_is_late_in_one_of_the_first_two_runs_leaves_all_plans_to_be_found(late):
    """The time of the other run was not used, and only 64 of 320 plans raced."""
    space, runs = options_of_one_kernel(), itertools.count()

    def answer(asked):
        ms = 0.9 if asked.plan["c"] == 19 else 1.0
        return AgreedMs(ms, 0.0) if next(runs) == late else ms

    _, winner = driven(predicted.fastest_predicted_plan(space, predicted.plans_of(space)), answer)
    assert winner["c"] == 19


def test_a_tile_that_wins_only_beside_another_number_of_pieces_is_found():
    """Beside other pieces the four fastest by launches alone, all of one tile, lost 5.4 %, 14.8 at worst."""
    runs, regrets = [], []
    for seed in range(20):
        session = GatheredProduct(seed)
        runs.append(len(session.session(RUNS_AT_MOST)))
        regrets.append(session.step_ms(session.winners()) / session.best_ms() - 1)
    assert statistics.fmean(runs) <= 310
    assert statistics.fmean(regrets) <= 0.003
    assert max(regrets) <= 0.015


class BesideCollective(GatheredProduct):
    """With a choice "way" before the others: a collective, beside which none of them is asked for.

    Four ranks begin a run apart by `apart`, a deviation over the best plan's time: early ones wait.
    """

    def __init__(self, seed: int, takes: float, apart: float = 0.0) -> None:
        super().__init__(seed)
        self.ranks = 4
        self._collective_ms, self._apart_ms = takes * self.best_ms(), apart * self.best_ms()
        self.contexts, self.choices = {"way": ["own", "collective"], **self.contexts}, ("way", *self.choices)

    def _is_launched(self, run: int, rank: int, name: str) -> bool:
        is_own = self._candidate("way") == "own"
        return name == "way" or (is_own and super()._is_launched(run, rank, name))

    def run(self) -> None:
        self._begin_ms = [self._random.gauss(0, self._apart_ms) for _ in range(self.ranks)]
        super().run()

    def _whole_ms(self, plan: dict[str, str], rank: int) -> float:
        return super()._whole_ms(plan, rank) + max(self._begin_ms) - self._begin_ms[rank]

    def step_ms(self, plan: dict[str, str]) -> float:
        return self._collective_ms if plan.get("way") == "collective" else super().step_ms(plan)


@pytest.mark.parametrize("apart", [0.0, 0.05])
def test_a_collective_that_is_faster_by_far_is_found_whatever_its_first_sample_was(apart):
    """One spike kept it out of the last race, or it was never tried: 8 of 40 sessions lost 18 to 31 %."""
    sessions = [BesideCollective(seed, 0.85, apart) for seed in range(24)]
    for session in sessions:
        session.session(RUNS_AT_MOST)
    assert {session.winners()["way"] for session in sessions} == {"collective"}


def test_a_plan_that_may_have_taken_less_beside_a_late_host_is_no_finalist_in_place_of_faster_ones():
    """With 10 % late runs winners lost 9.3 %, not 0.2: what a plan may take at least was believed."""

    def regret(seed: int) -> float:
        drawn = random.Random(seed)
        by_launches = {index: drawn.uniform(1.0, 1.2) for index in range(16)}
        space = space_of(by_launches, 4, [f"B: {2 ** (i // 4)}, G: {2 ** (i % 4)}" for i in range(16)])
        plans, timed = predicted.plans_of(space), defaultdict(list)
        own = [by_launches[plan["k"]] * drawn.gauss(1, 0.05) for plan in plans]

        def answer(asked):
            ms = own[plans.index(asked.plan)] * drawn.lognormvariate(0, 0.005)
            late_ms = 0.6 * drawn.random() if drawn.random() < 0.1 else 0.0  # beside the device's work
            timed[asked.label].append(ms)
            agreed_ms = statistics.median(timed[asked.label])
            return AgreedMs(agreed_ms, agreed_ms - late_ms) if late_ms else agreed_ms

        _, winner = driven(predicted.fastest_predicted_plan(space, plans), answer)
        return own[plans.index(winner)] / min(own) - 1

    assert statistics.fmean(map(regret, range(30))) <= 0.005
