"""What a sample times, and what is picked by it: sessions on virtual GPUs.

First uses, copies and peers, options and their own kernels, near ties, slow hosts, processes that go on.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from kernels_for_tests import block_of, double, only
from virtual_gpu import VirtualGpu, VirtualGpus, autotuned

from dist_autotune import is_tuning, tunable
from dist_autotune.ranks.exchange import ExchangeWait

NOISE = 0.02
CONSUMERS = {"specialized": 0.160, "plain": 0.167, "matmul": 0.234}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> VirtualGpus:
    return VirtualGpus(1).install(monkeypatch)


def context(report: Any, kernel: str) -> Any:
    (found,) = [context for context in report.contexts if context.kernel == kernel]
    return found


def launch(kernel: Any, n: int = 64) -> None:
    kernel[(1,)](0, 0, n)


# ---- first uses, which cost the host


@pytest.mark.parametrize(
    ("host_ms", "most_cold_runs"), [(0.1, 3), (0.5, 1)], ids=["up to three cold runs", "one cold run"]
)
def test_a_fresh_session_picks_the_option_that_is_fastest_when_settled(monkeypatch, host_ms, most_cold_runs):
    """All but the one that is warm cost the host ms in their first runs: compiling, modules, descriptors."""
    picks = Counter()
    for seed in range(20):
        random = Random(seed)
        (gpu,) = VirtualGpus(1).install(monkeypatch)
        cold = {
            name: [random.uniform(4, 10) for _ in range(random.randint(1, most_cold_runs))]
            for name in CONSUMERS
        }
        cold["matmul"] = []

        def step(gpu=gpu, random=random, cold=cold):
            consumer = tunable("consumer", [*CONSUMERS])
            gpu.first_use(consumer, *cold[consumer])
            gpu.launch(CONSUMERS[consumer] * random.gauss(1, 0.01), host_ms=host_ms)
            gpu.synchronize()
            return consumer

        picks[gpu.gpus.tuned(step)()] += 1
    assert picks == {"specialized": 20}


# ---- copies that the function has forked, and peers that are late

COPY_MS = 0.2
TILES: dict[int, Callable[[Any], Sequence[Any]]] = {
    16: lambda arrival: [arrival, 0.17],  # best where all is there: as if tuned alone
    32: lambda arrival: [0.11, arrival, 0.11],  # what is there first
    64: lambda arrival: [arrival, 0.19],
}


def pushing(gpus: VirtualGpus, peer_is_late_ms: float) -> list[tuple[Any, float]]:
    """Each of two ranks copies to the other beside a kernel that waits for the other's copy.

    Returns, of each rank, what is agreed of that kernel and how long it took in a settled call. The second
    rank begins its copy later.
    """

    def program(gpu: VirtualGpu) -> tuple[Any, float]:
        side, runs, commands = torch.cuda.Stream(), itertools.count(), []
        arrivals: list[Any] = []
        kernel = autotuned(
            TILES,
            lambda block: commands.append(
                gpu.launch(*TILES[block](arrivals[-1]), host_ms=0.1 if is_tuning() else 0.01)
            ),
        )

        def step() -> None:
            run = next(runs)
            arrivals.append(gpus.flag(run, "from", 1 - gpu.rank))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                gpu.launch(gpu.rank * peer_is_late_ms)
                gpu.launch(COPY_MS, sets=gpus.flag(run, "from", gpu.rank))
            launch(kernel)
            torch.cuda.current_stream().wait_stream(side)
            gpu.synchronize()

        tuned = gpus.tuned(step)
        tuned()
        assert tuned.settled
        for _ in range(3):
            barrier = ExchangeWait("a barrier of the program's", 1.0)
            gpus.group.agreements[gpu.rank].exchange(b"", lambda reports: b"", barrier)
            step_began = len(commands)
            tuned()
            (command,) = commands[step_began:]
        return only(tuned.report), command.ms

    return gpus.run(program)


@pytest.mark.parametrize("late_ms", [0.0, 0.3])
def test_the_agreed_time_of_a_kernel_holds_what_it_waits_for_in_a_settled_call(monkeypatch, late_ms):
    gpus = VirtualGpus(2, lag_ms=lambda rank: 0.01 * rank).install(monkeypatch)
    (zero, zero_ms), (one, one_ms) = pushing(gpus, late_ms)
    assert zero.ms == one.ms
    settled_ms = max(zero_ms, one_ms)
    assert settled_ms > late_ms + COPY_MS  # there is something to wait for
    assert zero.ms == pytest.approx(settled_ms, abs=0.04)


def test_the_tile_that_is_best_when_data_comes_late_wins(monkeypatch):
    gpus = VirtualGpus(2, lag_ms=lambda rank: 0.01 * rank).install(monkeypatch)
    assert [block_of(found.config) for found, _ in pushing(gpus, 0.0)] == [32, 32]


# ---- options and the kernels that only they launch

OWN_MS = {16: 2.0, 32: 0.8, 64: 1.5}


@pytest.mark.parametrize("n_repeat", [2, 10], ids=["early", "after more than 16 runs of another kernel"])
def test_an_option_is_compared_with_the_kernel_that_only_it_launches_tuned(gpus, n_repeat):
    gpu, extra_ms = gpus[0], {"matmul": 1.0, "plain": 0.0}
    before = autotuned([16, 32], lambda block: gpu.launch(0.1 + 0.001 * block))
    own = autotuned(OWN_MS, lambda block: gpu.launch(OWN_MS[block]), double)

    def step() -> None:
        launch(before)
        option = tunable("consumer", [*extra_ms])
        gpu.launch(extra_ms[option])
        if option == "plain":
            launch(own)
        gpu.synchronize()

    tuned = gpus.tuned(step, n_warmup=0, n_repeat=n_repeat)
    tuned()
    assert context(tuned.report, "consumer").config == "plain"
    assert block_of(context(tuned.report, "double").config) == 32
    assert {found.status for found in tuned.report.contexts} == {"tuned"}


# ---- ties


def option_winner(gpus: VirtualGpus, ms: Sequence[float], random: Random) -> int:
    """Return which of so many options wins."""
    gpu = gpus[0]

    def step() -> int:
        option = tunable("option", range(len(ms)))
        gpu.launch(ms[option] * random.gauss(1, NOISE))
        gpu.synchronize()
        return option

    return int(gpus.tuned(step)())


def test_the_winner_of_a_near_tie_is_the_same_in_57_of_60_sessions(monkeypatch):
    ms = (1.000, 0.995, 0.998, 0.996)
    found = Counter(
        option_winner(VirtualGpus(1).install(monkeypatch), ms, Random(session)) for session in range(60)
    )
    assert found[0] >= 57, found
