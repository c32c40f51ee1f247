"""What a replayed call is given, and who looks on: as if it had run once, or refused before it runs."""

import collections
import contextlib
import traceback
from typing import Any

import pytest
import torch
from kernels_for_tests import launch, numbers, only, winner
from torch.utils.checkpoint import checkpoint

from dist_autotune.errors import NotRepeatable

MS = {16: 3.0, 32: 1.0, 64: 2.0}


def ones_of(n: int) -> list[torch.Tensor]:
    return [numbers(n), numbers(n)]


ITERATORS = {
    "a generator": lambda: (x for x in ones_of(64)),
    "a map": lambda: map(torch.clone, ones_of(64)),
    "in a dict": lambda: {"batches": iter(ones_of(64))},
    "deep in a list": lambda: [({"batches": iter(ones_of(64))},)],
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@pytest.mark.parametrize("is_keyword", [False, True], ids=["by position", "by name"])
def test_an_iterator_is_refused_by_its_name_before_the_function_runs(bench, make, is_keyword):
    kernel, ran = bench.kernel(MS), []

    def total(batches: Any) -> None:
        ran.append(batches)
        launch(kernel, numbers())

    tuned = bench.tune(total)
    with pytest.raises(NotRepeatable, match=r"argument 'batches'.*list.*online"):
        tuned(**{"batches": make()}) if is_keyword else tuned(make())
    assert ran == []
    tuned(ones_of(64))
    assert winner(only(tuned.report)) == 32


def test_a_settled_call_does_not_take_an_iterator_that_a_new_key_would_need_again(bench):
    kernel = bench.kernel(MS)
    tuned = bench.tune(lambda batches: [launch(kernel, x) for x in batches])
    tuned(ones_of(64))
    with pytest.raises(NotRepeatable, match="list_iterator"):
        tuned(iter(ones_of(128)))
    nested = bench.tune(lambda held: [launch(kernel, x) for x in held["batches"]])
    nested({"batches": ones_of(64)})
    assert len(nested({"batches": iter(ones_of(128))})) == 2  # it is seen when the run has used it up
    ((_, (n, *_), reason),) = nested.untuned
    assert (n, "iterator" in reason) == (128, True)


def test_what_nothing_is_tried_in_takes_iterators(bench, monkeypatch):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    kernel = bench.kernel(MS)
    tuned = bench.tune(lambda batches: [launch(kernel, x) for x in batches])
    assert [len(tuned(iter(ones_of(64)))) for _ in range(2)] == [2, 2]


CONTAINERS = {
    "dict": dict,
    "UserDict": collections.UserDict,
    "defaultdict": lambda given: collections.defaultdict(int, given),
    "in a list": lambda given: [dict(given)],
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_a_function_that_takes_its_arguments_apart_finds_them_whole_in_each_run(bench, make):
    kernel = bench.kernel(MS)

    def loss(batch: Any, log: list[int]) -> torch.Tensor:
        log.append(len(log))
        batch = batch.pop() if isinstance(batch, list) else batch
        labels = batch.pop("labels")
        return launch(kernel, batch["x"]) - labels

    tuned = bench.tune(loss)
    for n in (64, 64, 128):  # tuned, settled, and a new key in a settled call
        batch, log = make({"x": numbers(n), "labels": torch.ones(n)}), [7]
        assert torch.equal(tuned(batch, log), numbers(n))
        assert "labels" not in batch
        assert log == [7, 1]  # as behind one execution
    assert [winner(each) for each in tuned.report.contexts] == [32]


def test_what_is_raised_in_a_further_run_says_that_the_function_was_run_again(bench):
    kernel, held = bench.kernel(MS), {"labels": 1}
    error = KeyError("labels")

    def loss():
        launch(kernel, numbers())
        if not held:
            raise error
        held.clear()

    tuned = bench.tune(loss)
    with pytest.raises(KeyError) as caught:
        tuned()
    assert caught.value is error
    said = "".join(traceback.format_exception_only(error))
    assert "run 2 of the call" in said
    assert "preserve=" in said
    held.clear()
    error = KeyError("labels")
    with pytest.raises(KeyError):  # the next call's first run is no repetition
        tuned()
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("within", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_tuned_layer_inside_a_checkpoint_has_the_gradients_of_one_execution(bench, early_stop, within):
    kernel, linear = bench.kernel(MS), torch.nn.Linear(8, 8)

    class PlusOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return launch(kernel, x.detach().reshape(-1)).reshape(x.shape)

        @staticmethod
        def backward(ctx, grad):
            return grad

    def layer(x):
        linear(x).sin()  # what autograd saves of it is gone before the run ends
        return PlusOne.apply(linear(x).cos()).sin()

    tuned = bench.tune(layer)
    for n in (4, 4, 5):
        x = torch.randn(n, 8, requires_grad=True)
        (want,) = torch.autograd.grad((linear(x).cos() + 1).sin().sum(), x)
        with within(), torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            y = checkpoint(tuned, x, use_reentrant=False)
            (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(got, want, atol=1e-6)
    assert [winner(each) for each in tuned.report.contexts] == [32]
