"""What runs leave behind: nothing is wiped, hidden or kept alive, and what is preserved is put back."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import accumulate, launch, numbers
from process_defaults import odd_defaults

# ---- hooks of stock benchmarking


def test_reset_to_zero_does_not_wipe_a_buffer_that_is_being_filled(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, accumulate, reset_to_zero=["y_ptr"])
    gradient = torch.ones(64)
    bench.tune(lambda: launch(kernel, numbers(), gradient))()
    assert torch.equal(gradient, 1 + numbers())


def test_restore_value_does_not_hide_an_update_from_the_rest_of_the_run(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, restore_value=["y_ptr"])
    seen = []

    def thunk():
        y = torch.zeros(64)
        launch(kernel, numbers(), y)
        seen.append(torch.equal(y, numbers() + 1))

    bench.tune(thunk)()
    assert seen == [True] * 3


def test_hooks_given_to_triton_autotune_are_not_called(bench):
    called = []
    kernel = bench.kernel(
        {16: 3.0, 32: 1.0},
        pre_hook=lambda *args, **kwargs: called.append("pre"),
        post_hook=lambda *args, **kwargs: called.append("post"),
    )
    bench.tune(lambda: launch(kernel, numbers()))()
    assert called == []


def test_a_session_makes_no_tensor_of_the_default_type_or_device(bench):
    """Put back, restore, hash and time, as a session does."""
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}, restore_value=["y_ptr"])
    x, y, seen = numbers(), torch.zeros(64), torch.zeros(1)
    tuned = bench.tune(lambda: (seen.add_(1), launch(kernel, x, y))[1], bits="check", preserve=(seen,))
    with odd_defaults():
        result = tuned()
    assert torch.equal(result, x + 1)
    assert (seen.item(), tuned.settled) == (1.0, True)


# ---- state that is put back between the runs of one call


class Step:
    """One training step of a small model with dropout, whose bias comes from an autotuned kernel."""

    def __init__(self, kernel: Any, optimizer: type[torch.optim.Optimizer], *, clears: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.kernel = kernel
        self.clears = clears

    def __call__(self) -> float:
        if self.clears:
            self.optimizer.zero_grad()
        x = torch.rand(4, 64) + random.random() + float(np.random.rand())
        shifted = torch.stack([launch(self.kernel, row.contiguous()) for row in x])
        loss = self.model(shifted).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[Any]:
        gradients = [p.grad for p in self.model.parameters()]
        return [copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()), gradients]


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def random_numbers() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("clears", [True, False], ids=["zero_grad first", "gradients pile up"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_training_step_leaves_model_optimizer_and_random_numbers_as_one_execution_does(
    bench, optimizer, clears
):
    plain = Step(bench.kernel({16: 1.0}), optimizer, clears=clears)
    seed()
    losses = [plain() for _ in range(3)]
    after = random_numbers()

    step = Step(bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}), optimizer, clears=clears)
    tuned = bench.tune(step, preserve=[step.model, step.optimizer], name="step")
    seed()
    assert [tuned() for _ in range(3)] == losses
    assert random_numbers() == after
    torch.testing.assert_close(step.state(), plain.state(), rtol=0, atol=0)


def step_of(kernel: Any, weight: torch.Tensor, drawn: list[Any]) -> Any:
    def step(n):
        drawn.append((float(torch.rand(1)), random.random(), float(np.random.rand())))
        launch(kernel, numbers(n))
        weight.add_(1)
        return weight.clone()

    return step


def test_a_new_key_is_tuned_beside_the_call_s_run_where_state_is_preserved(bench, kernel):
    weight, drawn = numbers(), []
    tuned = bench.tune(step_of(kernel, weight, drawn), preserve=[weight])
    tuned(64)
    for _ in range(20):
        tuned(64)
    drawn.clear()
    assert torch.equal(tuned(128), numbers() + 22)
    assert bench.blocks(n=128) == [32, 32, 16, 32]
    assert torch.equal(weight, numbers() + 22)
    first, *trials = drawn
    assert len(set(trials)) == 1
    tuned(128)
    assert drawn[-1] == trials[0] != first  # what one run would have left
    assert torch.equal(weight, numbers() + 23)


# ---- one run per call: bit for bit what the undecorated function does


class BlockSum:
    """A training step whose result depends, in its last bits, on the config: sums in blocks of BLOCK."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.data = iter(torch.rand(1000, 8, 64, generator=torch.Generator().manual_seed(2)))

    def train(self, block: int) -> float:
        x = next(self.data)
        self.optimizer.zero_grad()
        y = self.model(x)
        loss = sum(part.sum() for part in (y / 3).pow(2).split(block))
        loss.backward()
        self.optimizer.step()
        return loss.item()


def test_online_training_is_bit_equal_to_the_same_configs_without_a_tuner(bench):
    kernel = bench.kernel({1: 3.0, 2: 1.0, 4: 2.0})
    tuned_job = BlockSum()

    def step():
        launch(kernel, numbers())
        return tuned_job.train(kernel.best_config.kwargs["BLOCK"])

    tuned = bench.tune(step, mode="online", n_repeat=2, n_warmup=1)
    losses = [tuned() for _ in range(14)]
    assert set(bench.blocks()) == {1, 2, 4}
    assert tuned.settled
    plain = BlockSum()
    assert [plain.train(block) for block in bench.blocks()] == losses
    torch.testing.assert_close(plain.model.state_dict(), tuned_job.model.state_dict(), rtol=0, atol=0)
