"""Functions that torch compiles or traces: what it hides is no launch, and nothing waits for one."""

import pytest
import torch
from kernels_for_tests import launch, numbers, only, records
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_autotune.logs.records import SessionClosed

MODES = pytest.mark.parametrize("mode", ["replay", "online"])
pytestmark = pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")


@pytest.fixture
def add_one(bench, kernel, request):
    """Return an operator of torch's that launches an autotuned kernel, and is traced without doing so."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    name = f"dist_autotune_tests::add_one_{abs(hash(request.node.nodeid))}"
    operator = torch.library.custom_op(name, body, mutates_args=())
    operator.register_fake(torch.empty_like)
    return operator


@MODES
def test_a_function_traced_with_fake_tensors_ends_at_once_and_says_so(bench, add_one, mode):
    tuned = bench.tune(lambda x: add_one(x), mode=mode)
    with FakeTensorMode():
        for _ in range(3):
            assert tuned(torch.empty(64)).shape == (64,)
    assert bench.blocks() == []
    assert (tuned.report.runs, tuned.report.contexts) == (1, ())
    (warning,) = {record.warning for record in records(SessionClosed)}
    assert "no kernel with several configs was launched" in warning
    assert torch.equal(tuned(numbers()), numbers() + 1)  # and is tuned when it is called in earnest


@MODES
def test_a_compiled_function_without_visible_launches_ends_at_once(bench, mode):
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    tuned = bench.tune(compiled, mode=mode)
    assert torch.equal(tuned(numbers()), numbers() + 1)
    assert (tuned.report.runs, tuned.report.contexts) == (1, ())
    assert "no kernel with several configs was launched" in records(SessionClosed)[0].warning


def test_launches_of_an_operator_in_a_compiled_function_are_tuned(bench, add_one):
    compiled = torch.compile(lambda x: add_one(x) * 2, backend="eager")
    tuned = bench.tune(compiled)
    assert torch.equal(tuned(numbers()), (numbers() + 1) * 2)
    assert bench.blocks() == [16, 32, 32]
    assert only(tuned.report).status == "tuned"


@MODES
def test_a_tuned_function_inside_a_compiled_function_is_called_between_its_graphs(bench, kernel, mode):
    tuned = bench.tune(lambda x: launch(kernel, x), mode=mode)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> object:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    compiled = torch.compile(lambda x: tuned(x * 2) + 1, backend=backend)
    calls = 1
    assert torch.equal(compiled(numbers()), numbers() * 2 + 2)
    while not tuned.settled:
        assert torch.equal(compiled(numbers()), numbers() * 2 + 2)
        calls += 1
    assert graphs == [["mul"], ["add"]]
    assert only(tuned.report).config.kwargs["BLOCK"] == 32
    assert calls <= len(bench.blocks()) == tuned.report.runs
