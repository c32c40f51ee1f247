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


def test_hooks_given_to_triton_autotune_are_not_called_and_reset_to_zero_wipes_nothing(bench):
    called, gradient = [], torch.ones(64)
    hooks = dict.fromkeys(("pre_hook", "post_hook"), lambda *args, **kwargs: called.append(None))
    kernel = bench.kernel({16: 3.0, 32: 1.0}, accumulate, reset_to_zero=["y_ptr"], **hooks)
    bench.tune(lambda: launch(kernel, numbers(), gradient))()
    assert called == []
    assert torch.equal(gradient, 1 + numbers())


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
