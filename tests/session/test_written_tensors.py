"""Tensors that `restore_value` and `reset_to_zero` name: the call ends as if the function had run once."""

import contextlib
import itertools
import sys
import threading
import weakref

import pytest
import torch
from kernels_for_tests import Mine, accumulate, launch, only, winner

from dist_autotune import TuningError
from dist_autotune.launch import written_tensors
from dist_autotune.tuner import session

MS = {16: 3.0, 32: 1.0, 64: 2.0}


def in_place(bench, sign: str = "restore_value", ms=MS, **options):
    return bench.kernel(ms, accumulate, **{sign: ["y_ptr"]}, **options)


def ones(n: int = 64) -> torch.Tensor:
    return torch.ones(n)


@pytest.mark.parametrize("sign", ["restore_value", "reset_to_zero"])
@pytest.mark.parametrize("search", ["exhaustive", "racing"])
@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_a_call_that_tunes_changes_them_as_one_run_does(bench, sign, search, objective):
    kernel, y = in_place(bench, sign), torch.zeros(50)
    address = y.data_ptr()
    tuned = bench.tune(lambda: launch(kernel, ones(50), y), search=search, objective=objective)
    assert torch.equal(tuned(), ones(50))
    assert tuned.report.runs > 3
    assert winner(only(tuned.report)) == 32
    assert torch.equal(y, ones(50))
    assert y.data_ptr() == address
    tuned()
    assert torch.equal(y, 2 * ones(50))


def test_parts_of_a_storage_are_put_back_and_nothing_beside_them(bench):
    kernel, whole = in_place(bench, key=()), torch.zeros(256)
    runs = []

    def thunk():
        runs.append(None)
        launch(kernel, ones(), whole[:64])
        launch(kernel, ones(), whole[32:96])  # they overlap
        launch(kernel, ones(), whole[128:192].view(8, 8))
        whole[200:] += 1  # no kernel's: it cannot be seen

    bench.tune(thunk)()
    expected = torch.zeros(256)
    expected[:64] += 1
    expected[32:96] += 1
    expected[128:192] += 1
    expected[200:] += len(runs)
    assert torch.equal(whole, expected)


def test_what_a_run_has_allocated_is_left_as_that_run_made_it(bench):
    kernel, outputs = in_place(bench), []

    def thunk():
        outputs.append(launch(kernel, ones(), torch.zeros(64)))
        assert torch.equal(outputs[-1], ones())  # the rest of the run sees the update

    bench.tune(thunk)()
    assert len(outputs) == 4
    assert all(torch.equal(each, ones()) for each in outputs)


@pytest.mark.parametrize(
    "view", [torch.conj, lambda z: z.conj().imag, lambda z: z.real], ids=["conjugate", "negative", "plain"]
)
def test_a_result_that_is_a_lazy_view_stays_what_it_was(view):
    result = view(torch.full((2,), 1 + 2j))
    expected, written = result.clone(), written_tensors.WrittenTensors()
    written.begin_runs(result)
    result.add_(3)
    written.restore()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("by", ["restore_value", "preserve"])
@pytest.mark.parametrize(  # the 5th is captured, and replayed then
    ("objective", "at_run"), [("kernel", 0), ("kernel", 1), ("kernel", 2), ("graph", 4), ("graph", 6)]
)
def test_a_run_that_raises_leaves_exactly_its_own_effects(bench, objective, at_run, by):
    kernel, y, runs = bench.kernel(MS, accumulate), torch.zeros(64), itertools.count()
    if by == "restore_value":
        kernel = in_place(bench)

    def thunk():
        launch(kernel, ones(), y)
        if next(runs) == at_run:
            raise RuntimeError("mine")
        launch(kernel, ones(), y)

    tuned = bench.tune(thunk, preserve=[y] if by == "preserve" else (), objective=objective)
    with pytest.raises(RuntimeError, match=r"^mine"):
        tuned()
    assert torch.equal(y, ones())
    tuned()
    assert torch.equal(y, 3 * ones())
    assert winner(only(tuned.report)) == 32


def test_neither_tensors_nor_copies_outlive_the_call(bench):
    kernel, x, y = in_place(bench), ones(), torch.zeros(64)
    tuned = bench.tune(lambda y: launch(kernel, x, y).sum())
    gone = weakref.ref(y)
    tuned(y)
    del y
    assert gone() is None
    written = tuned._calls.state.written
    assert (written._copies, written._there_before) == ({}, None)


# ---- new keys of a settled function


@pytest.mark.parametrize("first", ["tuned", "with one config"])
def test_a_new_key_beside_a_settled_kernel_is_tuned_by_runs_that_leave_nothing(bench, first):
    kernel = in_place(bench, ms=MS if first == "tuned" else {16: 1.0})
    other, y = bench.kernel({16: 3.0, 32: 1.0}), torch.zeros(64)

    def thunk(n):
        launch(kernel, ones(), y)
        launch(other, ones(n))
        return y

    tuned = bench.tune(thunk)
    for calls, n in enumerate((8, 8, 16, 32, 16), start=1):
        result = tuned(n)
        assert result is y
        assert torch.equal(y, calls * ones())
        assert bench.blocks("add", n=n)[-1] == 32
    assert tuned.settled


def test_settled_calls_copy_nothing(bench, monkeypatch):
    kernel, y, weight = in_place(bench), torch.zeros(64), torch.zeros(1)
    single = in_place(bench, ms={16: 1.0})

    def thunk():
        launch(kernel, ones(), y)
        launch(single, ones(), y)
        weight.add_(1)

    tuned = bench.tune(thunk, preserve=[weight], n_warmup=None, n_repeat=None)
    tuned()
    monkeypatch.setattr(session, "Snapshot", lambda *args: pytest.fail("a copy of what is preserved"))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *args, **kwargs: pytest.fail("a copy"))
    monkeypatch.setattr(written_tensors, "_tensors", lambda: pytest.fail("a look at all tensors"))
    for _ in range(3):
        tuned()
    assert torch.equal(y, 8 * ones())
    assert weight.item() == 4


def test_no_memory_for_a_copy_is_told_and_bans_nothing(bench, monkeypatch):
    kernel, y = in_place(bench), torch.zeros(64)
    tuned = bench.tune(lambda: launch(kernel, ones(), y))

    def clone(tensor, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched, contextlib.suppress(RuntimeError):
        patched.setattr(torch.Tensor, "clone", clone)
        with pytest.raises(TuningError, match=r'accumulate.y_ptr: no memory .* its 256 bytes.*mode="online"'):
            tuned()
    tuned()
    assert torch.equal(y, ones())
    assert only(tuned.report).banned == {}


def test_tuples_that_another_thread_builds_are_left_alone():
    is_over, built, errors = threading.Event(), [], []

    def build():
        while not is_over.is_set():
            try:
                built.append(len(tuple(number for number in range(200))))
            except SystemError as error:
                errors.append(error)

    interval_s, worker = sys.getswitchinterval(), threading.Thread(target=build)
    sys.setswitchinterval(1e-6)
    worker.start()
    try:
        for _ in range(30):
            written_tensors.instances({Mine})
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        worker.join()
    assert errors == []
    assert set(built) == {200}
