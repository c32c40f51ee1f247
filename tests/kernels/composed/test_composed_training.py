"""That tensor-parallel layers train as plain ones beside shards, checkpoints, compiling and a pipeline."""

from __future__ import annotations

import pytest
from composed_training import piped, trained
from operation_runs import values

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* has not been tuned"),  # at first they have not
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Dynamo looks at `grad` of what a norm's parameters are made for the call, in a module of FSDP2.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SMALL, LARGE = 16, 256  # width
EXACT, ROUNDED = 1e-4, 0.05  # of float32; of bfloat16, a few roundings to 8 bits


def trains(world, dp, blocks, width, compiler, most):
    for difference, contexts in values(trained, world, dp, blocks, width, compiler):
        assert difference < most
        assert contexts > 0


@pytest.mark.usefixtures("compiler")
def test_a_block_in_shards_checkpointed_and_compiled_trains_while_it_is_tuned():
    trains(2, 1, 1, SMALL, "aot_eager", EXACT)


@pytest.mark.gpu(devices=2, seconds=60)
def test_so_do_two_on_two_gpus():
    trains(2, 1, 2, LARGE, "inductor", ROUNDED)


@pytest.mark.gpu(devices=4, seconds=60)
def test_so_do_two_on_four_gpus():
    trains(4, 2, 2, LARGE, "inductor", ROUNDED)


def test_two_stages_of_a_pipeline_train_while_their_weights_move():
    assert max(values(piped, 4, SMALL, timeout_s=60.0)) < EXACT


@pytest.mark.gpu(devices=2, seconds=30)
def test_two_stages_of_a_pipeline_train_on_two_gpus():
    assert max(values(piped, 2, LARGE)) < ROUNDED


@pytest.mark.gpu(devices=4, seconds=40)
def test_two_stages_of_a_pipeline_train_on_four_gpus():
    assert max(values(piped, 4, LARGE)) < ROUNDED
