"""Where runs end: the steps of one optimizer among several, or the calls of a function in a module."""

import sys

import pytest
import torch

from dist_autotune.errors import InvalidOption
from dist_autotune.script.boundaries import STEPS_OF_OTHERS, NamedCalls, OptimizerSteps


class Optimizer:
    """A stand-in, of which a step is counted by hand."""


def ends(boundary: OptimizerSteps, *optimizers: Optimizer) -> list[bool]:
    return [boundary.count_step(optimizer) for optimizer in optimizers]


def test_a_run_ends_with_each_step_of_the_optimizer_that_steps_first():
    first, second = Optimizer(), Optimizer()
    assert ends(OptimizerSteps(), first, second, first, second, second, first) == [1, 0, 1, 0, 0, 1]


def test_an_optimizer_that_steps_long_without_the_first_takes_its_place():
    boundary, first, second = OptimizerSteps(), Optimizer(), Optimizer()
    ends(boundary, first)
    assert ends(boundary, *[second] * (STEPS_OF_OTHERS + 2)) == [0] * STEPS_OF_OTHERS + [1, 1]
    assert ends(boundary, first, second) == [0, 1]


def test_steps_of_torchs_optimizers_end_runs_while_they_are_watched():
    ended: list[None] = []
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with OptimizerSteps().watched(lambda: ended.append(None)):
        optimizer.step()
        optimizer.step()
    optimizer.step()
    assert len(ended) == 2


MODULE = """
class Model:
    def forward(self, depth):
        return self.forward(depth - 1) if depth else "done"

    @staticmethod
    def fixed(x):
        return x

    @classmethod
    def made(cls):
        return cls()

class Child(Model):
    pass

def fails():
    raise ValueError("mine")

def works():
    return 1

number = 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that can be imported, and has not been."""
    (tmp_path / "stepping.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "stepping"
    sys.modules.pop("stepping", None)


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("works", lambda m: m.works() == 1),
        ("Model.forward", lambda m: m.Model().forward(3) == "done"),  # calls itself: one end
        ("Model.forward", lambda m: m.Child().forward(0) == "done"),
        ("Child.forward", lambda m: m.Child().forward(0) == "done"),
        ("Model.fixed", lambda m: m.Model.fixed(5) == 5),
        ("Model.made", lambda m: type(m.Child.made()) is m.Child),
    ],
)
def test_a_run_ends_when_the_named_function_has_returned(module, path, call):
    ended: list[None] = []
    with NamedCalls(f"{module}:{path}").watched(lambda: ended.append(None)):
        import stepping

        assert call(stepping)
        assert len(ended) == 1
    before = dict(vars(stepping.Child))
    assert call(stepping)
    assert len(ended) == 1
    assert "forward" not in before  # put back as it was: inherited


@pytest.mark.parametrize(
    "name", ["works", "stepping:", "stepping:Model.", ":works", "__main__:works", "a b:c"]
)
def test_a_name_that_cannot_be_one_is_an_error_with_its_value(name):
    with pytest.raises(InvalidOption, match=f"--step {name!r}: expected module:function"):
        NamedCalls(name)


@pytest.mark.parametrize(
    ("path", "reason"), [("Model.missing", "stepping has no Model.missing"), ("number", "7 is no function")]
)
def test_a_function_that_is_not_there_is_an_error_at_the_import(module, path, reason):
    with (
        NamedCalls(f"{module}:{path}").watched(lambda: None),
        pytest.raises(InvalidOption, match=reason),
    ):
        import stepping  # noqa: F401
