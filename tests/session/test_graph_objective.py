"""objective="graph": replays of a captured run judge; eager calls keep what they have found."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels_for_tests import only
from virtual_gpu import VirtualGpu, VirtualGpus, autotuned

from dist_autotune import PeerFailed, TuningError, contextual_autotune, tunable
from dist_autotune.errors import CaptureFailed, InvalidOption
from dist_autotune.timing import graph_replays
from dist_autotune.timing.graph_replays import REPLAYS
from dist_autotune.tuner import base_tuner

EAGER_MS, CAPTURED_MS = {16: 0.060, 32: 0.064}, {16: 0.072, 32: 0.064}  # a push takes the place of pulls
WAYS = {"pull": 16, "push": 32}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in the interpreter would not be captured."""
    monkeypatch.setattr(graph_replays, "interception", SimpleNamespace(is_interpreted=lambda: False))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> VirtualGpus:
    return VirtualGpus(1).install(monkeypatch)


class Step:
    """A function that launches one thing, which takes longer or shorter where it is captured."""

    def __init__(self, gpu: VirtualGpu, kind: str) -> None:
        self.gpu, self.launched = gpu, []
        self.kernel = autotuned(EAGER_MS, self.launch) if kind == "kernel" else None

    def launch(self, block: int) -> None:
        self.launched.append((block, self.gpu.graph is not None))
        self.gpu.launch((CAPTURED_MS if self.gpu.graph else EAGER_MS)[block])

    def __call__(self) -> int:
        if self.kernel is None:
            self.launch(WAYS[tunable("way", [*WAYS], key=(id(self),))])
        else:
            self.kernel[(1,)](0, 0, 64)
        return self.launched[-1][0]


def captured(gpu: VirtualGpu, call: Any) -> int:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        return call()
    finally:
        graph.capture_end()


@pytest.mark.parametrize("kind", ["kernel", "choice"])
def test_what_wins_in_replays_is_launched_by_the_function_judged_so_alone(gpus, kind):
    (gpu,) = gpus
    step = Step(gpu, kind)
    eager, replayed = gpus.tuned(step), gpus.tuned(step, objective="graph")
    assert (eager(), replayed()) == (16, 32)
    assert (captured(gpu, eager), captured(gpu, replayed)) == (16, 32)
    assert step() == captured(gpu, step) == 16  # outside tuned functions
    (judged,) = replayed.report.contexts
    assert [*judged.timings.values()] == pytest.approx([0.072, 0.064], abs=1e-6)


@pytest.mark.parametrize("kind", ["kernel", "choice"])
def test_launches_outside_take_the_result_of_replays_where_there_is_no_other(gpus, kind):
    step = Step(gpus[0], kind)
    gpus.tuned(step, objective="graph")()
    assert captured(gpus[0], step) == 32
    assert gpus.tuned(step)() == 16  # tuned by its own runs
    assert captured(gpus[0], step) == 16


def test_another_process_finds_each_result_in_the_cache(gpus, tmp_path):
    first = Step(gpus[0], "kernel")
    for objective in ("kernel", "graph"):
        gpus.tuned(first, objective=objective, cache=tmp_path)()
    step = Step(gpus[0], "kernel")
    eager = gpus.tuned(step, cache=tmp_path)
    replayed = gpus.tuned(step, objective="graph", cache=tmp_path)
    assert (eager(), replayed(), captured(gpus[0], replayed)) == (16, 32, 32)
    assert {context.status for context in (only(eager.report), only(replayed.report))} == {"cached"}


def test_each_judged_run_is_captured_once_and_no_graph_is_left(gpus):
    (gpu,), alive = gpus, []
    step = Step(gpu, "choice")

    def counted() -> int:
        alive.append(len(gpu.graphs))
        return step()

    tuned = gpus.tuned(counted, objective="graph")
    tuned()
    captures = sum(is_captured for _, is_captured in step.launched)
    assert len(step.launched) == tuned.report.runs + captures
    assert gpu.replays == [1 + REPLAYS] * captures
    assert 0 < captures < tuned.report.runs
    assert max(alive) == 2  # the last one, whose memory the new one shares
    assert len(gpu.graphs) == 0


@pytest.mark.parametrize("fails", [0, 1], ids="rank {}".format)
def test_a_capture_that_fails_on_one_rank_ends_the_session_on_all_and_is_named(monkeypatch, fails):
    gpus = VirtualGpus(2).install(monkeypatch)

    def program(gpu: VirtualGpu) -> list[Any]:
        step, found = Step(gpu, "kernel"), []

        def run() -> int:
            if gpu.graph and gpu.rank == fails and len(found) < 2:
                torch.cuda.current_stream().query()
            return step()

        tuned = gpus.tuned(run, objective="graph")
        while len(found) < 3:
            try:
                found.append(tuned())
            except TuningError as error:
                found.append(error)
            assert gpu.graph is None
            assert len(gpu.graphs) == 0
        return found

    ends = gpus.run(program)
    for *failed, result in ends:
        assert result == 32
        for error in failed:
            assert "not permitted when stream is capturing" in str(error)
            assert f"rank {fails} cannot capture" in str(error)
    assert [type(error) for error in ends[fails][:2]] == [CaptureFailed] * 2
    assert [(type(error), error.rank) for error in ends[1 - fails][:2]] == [(PeerFailed, fails)] * 2


@pytest.mark.parametrize("mode", ["tune", "off"])
def test_without_a_gpu_it_is_refused_where_the_function_is_decorated(monkeypatch, mode):
    monkeypatch.setattr(base_tuner, "is_interpreted", lambda: False)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    refused = pytest.raises(
        InvalidOption, match=r"objective='graph'.*is_available\(\) is False.*Leave it out"
    )
    with refused if mode == "tune" else contextlib.nullcontext():
        contextual_autotune(lambda: None, objective="graph")


def test_steps_that_happen_once_are_not_judged_by_replays(gpus):
    with pytest.raises(InvalidOption, match="objective='graph' belongs to mode='replay'"):
        gpus.tuned(lambda: None, objective="graph", mode="online")
