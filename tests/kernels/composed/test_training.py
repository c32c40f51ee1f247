"""That tensor-parallel layers train as plain ones beside shards, checkpoints, compiling and a pipeline."""

from __future__ import annotations

import pytest
from composed_training import piped, trained
from operation_runs import INTERPRETER, values

pytestmark = [
    INTERPRETER,
    pytest.mark.filterwarnings("ignore:.* has not been tuned"),  # at first they have not
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    # Dynamo looks at `grad` of what a norm's parameters are made for the call, in a module of FSDP2.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SMALL, LARGE = 16, 256  # width
EXACT, ROUNDED = 1e-4, 0.05  # of float32; of bfloat16, a few roundings to 8 bits
FOUR = pytest.param(4, 2, marks=pytest.mark.gpu(devices=4, seconds=60), id="2 x 2 GPUs")


@pytest.mark.usefixtures("compiler")
def test_a_block_in_shards_checkpointed_and_compiled_trains_while_it_is_tuned():
    for most, contexts in values(trained, 2, 1, 1, SMALL, "aot_eager", timeout_s=60.0):
        assert most < EXACT
        assert contexts > 0


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize(
    ("world", "dp"), [pytest.param(2, 1, marks=pytest.mark.gpu(devices=2, seconds=60), id="2 GPUs"), FOUR]
)
def test_so_do_two_on_gpus(world, dp):
    for most, contexts in values(trained, world, dp, 2, LARGE, "inductor"):
        assert most < ROUNDED
        assert contexts > 0


def test_two_stages_of_a_pipeline_train_while_their_weights_move():
    assert max(values(piped, 4, SMALL, timeout_s=60.0)) < EXACT


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(2, marks=pytest.mark.gpu(devices=2, seconds=30), id="2 GPUs"),
        pytest.param(4, marks=pytest.mark.gpu(devices=4, seconds=40), id="4 GPUs"),
    ],
)
def test_two_stages_of_a_pipeline_train_on_gpus(world):
    assert max(values(piped, world, LARGE)) < ROUNDED
