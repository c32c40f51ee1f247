"""Where runs end: the steps of one optimizer among several, or the calls of a function in a module."""

import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_autotune.errors import InvalidOption
from dist_autotune.script.boundaries import SERIES_OF_OTHERS, NamedCalls, OptimizerSteps


class Optimizer:
    """A stand-in, of which a step is counted by hand."""


def ends(boundary: OptimizerSteps, *series: str | list[Optimizer]) -> list[list[bool]]:
    """Return for each step of each series whether a run ends with it."""
    return [
        [boundary.begin_series() or boundary.count_step(each) for each in steps[:1]]
        + [boundary.count_step(each) for each in steps[1:]]
        for steps in series
    ]


def test_a_run_ends_with_each_step_of_the_optimizer_that_steps_first():
    a, b = Optimizer(), Optimizer()
    assert ends(OptimizerSteps(), [a], [b], [a, b], [b], [a]) == [[1], [0], [1, 0], [0], [1]]


def test_several_steps_of_a_training_step_end_one_run_with_the_last_as_soon_as_it_is_known():
    a, b = Optimizer(), Optimizer()
    boundary = OptimizerSteps()
    assert ends(boundary, [a] * 4, [a] * 4) == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert ends(boundary, [a, b, a], [a, a]) == [[0, 0, 0], [0, 1]]  # fewer than before: one run for two
    assert ends(boundary, [a] * 3, [a] * 2, [a] * 3) == [[0, 1, 0], [0, 1], [0, 1, 0]]


def test_as_many_optimizers_as_there_are_parameters_end_one_run():
    each = [Optimizer() for _ in range(50)]
    assert [sum(ended) for ended in ends(OptimizerSteps(), *[each] * 40)] == [1] * 40


def test_an_optimizer_that_steps_long_without_the_first_takes_its_place():
    boundary, a, b = OptimizerSteps(), Optimizer(), Optimizer()
    ends(boundary, [a])
    found = ends(boundary, *[[b]] * (SERIES_OF_OTHERS + 2))
    assert found == [[0]] * SERIES_OF_OTHERS + [[1], [1]]
    assert ends(boundary, [a], [b]) == [[0], [1]]


@pytest.fixture
def ended():
    """What has happened, while steps of torch's optimizers are watched: names, and the ends of runs."""
    events: list[str] = []
    with OptimizerSteps().watched(lambda: events.append("end")):
        yield events


def parameter() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight


def stepping_in_backward(weight: torch.nn.Parameter, events: list[str], name: str) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()
        events.append(name)

    weight.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_steps_inside_a_backward_pass_end_one_run_behind_it(ended, use_reentrant):
    first, inner, last = parameter(), parameter(), parameter()
    for name, weight in {"first": first, "inner": inner, "last": last}.items():
        stepping_in_backward(weight, ended, name)
    for _ in range(20):
        ended.clear()
        x = checkpoint(lambda x: (x * inner).sin(), first * 2, use_reentrant=use_reentrant)
        (x * last).sum().backward()
        assert ended == ["last", "inner", "first", "end"]
    ended.clear()
    first.grad = torch.ones(2)
    torch.optim.SGD([first], lr=0.1).step()  # another one, that does not lead
    assert ended == []


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
    ("path", "reason"), [("Model.missing", "stepping has no Model.missing"), ("number", "7 is no function")]
)
def test_a_function_that_is_not_there_is_an_error_at_the_import(module, path, reason):
    with NamedCalls(f"{module}:{path}").watched(lambda: None), pytest.raises(InvalidOption, match=reason):
        import stepping  # noqa: F401


def test_a_function_that_never_ended_a_run_is_told_with_the_reason(module):
    named = NamedCalls(f"{module}:works")
    with named.watched(lambda: None):
        assert named.missing.startswith(
            "the program imported no module stepping, which --step stepping:works names"
        )
        import stepping  # noqa: F401

        assert named.missing == "stepping:works has not been called"
