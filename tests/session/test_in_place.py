"""Work in place that nobody declared: found at the first repeat, put back, and told."""

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from kernels_for_tests import accumulate, double, launch, numbers, winner

RACING = {"n_warmup": None, "n_repeat": None}  # run 2 has the plan of run 1
MS = {16: 3.0, 32: 1.0, 64: 2.0}


def in_place_by_kernel(bench: Any) -> tuple[Any, torch.Tensor]:
    kernel, total = bench.kernel(MS, accumulate), torch.zeros(64)
    return lambda: launch(kernel, torch.ones(64), total), total


def in_place_by_torch_before_a_declared_write(bench: Any) -> tuple[Any, torch.Tensor]:
    kernel, total = bench.kernel(MS, accumulate, restore_value=["y_ptr"]), torch.zeros(64)

    def step():
        total.add_(1)
        return launch(kernel, torch.zeros(64), total)

    return step, total


def gradient(bench: Any) -> tuple[Any, torch.Tensor]:
    kernel, weight = bench.kernel(MS), torch.ones(64, requires_grad=True)
    total = torch.zeros(64)

    def step():
        launch(kernel, numbers())
        weight.sum().backward()
        with torch.no_grad():
            total.copy_(weight.grad)
        return weight.grad.clone()

    return step, total


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (in_place_by_kernel, "argument y_ptr of accumulate"),
        (in_place_by_torch_before_a_declared_write, "a tensor written by torch"),
        (gradient, "a (gradient|tensor written by torch)"),
    ],
)
def test_it_is_put_back_told_once_and_the_keys_stay_untuned_until_retune(bench, make, names):
    step, total = make(bench)
    tuned = bench.tune(step, **RACING)
    with pytest.warns(
        UserWarning, match=rf"changes {names}, of shape \(64,\), in place: .*preserve="
    ) as caught:
        result = tuned()
    assert len(caught) == 1
    assert torch.equal(total, torch.ones(64))  # as behind one execution
    assert torch.equal(result, torch.ones(64))
    assert bench.blocks() == [16, 16]
    ((_, _, reason),) = tuned.untuned
    assert "in place" in reason or "changes" in reason
    assert tuned.settled
    for number in (2, 3):
        assert torch.equal(tuned(), torch.full((64,), float(number)))
    assert len(bench.blocks()) == 4
    tuned.retune()
    with pytest.warns(UserWarning, match="preserve="):
        tuned()
    assert total[0] == 4


@pytest.mark.parametrize(("n_warmup", "n_repeat", "is_found"), [(1, 1, True), (0, 2, True), (0, 1, False)])
def test_runs_that_are_asked_for_are_compared_if_the_first_two_have_one_config(
    bench, n_warmup, n_repeat, is_found
):
    step, total = in_place_by_kernel(bench)
    tuned = bench.tune(step, n_warmup=n_warmup, n_repeat=n_repeat)
    with pytest.warns(UserWarning, match="in place") if is_found else contextlib.nullcontext():
        tuned()
    assert (total[0] == 1) == is_found
    assert bench.blocks() == [16, 16] if is_found else [16, 32, 64, 32]


def test_what_is_declared_or_written_anew_in_each_run_is_no_work_in_place(bench):
    kernel, other = bench.kernel(MS), bench.kernel(MS, double)
    out, counted, noise = torch.zeros(64), torch.zeros(()), torch.zeros(64)
    weight, no_memory = torch.ones(64, requires_grad=True), torch.ones(2).to("meta")
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    def step():
        jagged.zero_()
        no_memory.zero_()
        launch(kernel, numbers(), out)
        launch(other, out)
        counted.add_(1)
        noise.copy_(torch.rand(64))
        weight.grad = None
        weight.sum().backward()
        return out

    tuned = bench.tune(step, preserve=[counted], **RACING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned()
    assert [winner(each) for each in tuned.report.contexts] == [32, 32]
    assert counted == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("other", "is_found"), [(1 + 1e-6, False), (float("inf"), True)])
def test_what_rounding_explains_is_no_work_in_place(bench, dtype, other, is_found):
    kernel, out, values = bench.kernel(MS), torch.zeros(64, dtype=dtype), itertools.cycle([1.0, other])

    def step():
        out.fill_(next(values))
        launch(kernel, numbers())

    tuned = bench.tune(step, **RACING)
    with pytest.warns(UserWarning, match="in place") if is_found else contextlib.nullcontext():
        tuned()
    assert bool(tuned.untuned) == is_found


@pytest.mark.parametrize("preserves", [False, True])
def test_it_is_found_where_only_a_key_of_a_later_call_leads_there(bench, preserves):
    kernel, total, kept = bench.kernel(MS), torch.zeros(()), torch.zeros(())

    def step(n):
        kept.add_(preserves)
        total.add_(n > 64)
        return launch(kernel, numbers(n)) + total

    tuned = bench.tune(step, preserve=[kept] if preserves else [], **RACING)
    tuned(64)
    with pytest.warns(UserWarning, match=r"in place: .* ended with two runs, .*preserve="):
        result = tuned(128)
    assert total == 2  # of the run that met the key, and of the one that was repeated
    assert torch.equal(result, numbers(128) + 1 + (1 if preserves else 2))
    assert kept == 2 * preserves
    assert [key[0] for _, key, _ in tuned.untuned] == [128]
    tuned(128)
    assert (total, kept) == (3, 3 * preserves)
