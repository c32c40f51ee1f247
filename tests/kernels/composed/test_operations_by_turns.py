"""That operations are right beside each other, torch's kernels, graphs and a session of the tuner."""

import pytest
from composed_runs import LARGE, SMALL, by_turns
from operation_runs import values

# At first they have not.
pytestmark = pytest.mark.filterwarnings("ignore:.* has not been tuned")


def test_all_operations_are_right_by_turns():
    assert values(by_turns, 2, SMALL, 20, False) == [[], []]


@pytest.mark.gpu(devices=1, seconds=30)
def test_so_they_are_on_one_gpu_in_graphs_and_eager_by_turns():
    assert values(by_turns, 1, LARGE, 80, True) == [[]]


@pytest.mark.gpu(devices=2, seconds=40)
def test_so_they_are_on_two_gpus_in_graphs_and_eager_by_turns():
    assert values(by_turns, 2, LARGE, 80, True) == [[], []]
