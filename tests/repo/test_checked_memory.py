"""That a kernel of a test that uses memory beside its tensors fails, and says where."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

ROOM = 64  # elements of the memory, of which a launch is given those from 16 to 32


@triton.jit
def use(x_ptr, begin, valid, HOW: tl.constexpr):
    offs = begin + tl.arange(0, 16)
    if HOW == "load":
        tl.load(x_ptr + offs, mask=offs < valid)
    if HOW == "store":
        tl.store(x_ptr + offs, offs, mask=offs < valid)
    if HOW == "add":
        tl.atomic_add(x_ptr + offs, 1, mask=offs < valid)
    if HOW == "swap":
        tl.atomic_cas(x_ptr + begin, 0, 1)
    if HOW == "describe":
        desc = tl.make_tensor_descriptor(x_ptr, [valid], [1], [16])
        desc.store([begin], offs)


def launch(how: str, begin: int, valid: int) -> torch.Tensor:
    memory = torch.zeros(ROOM, dtype=torch.int32)
    use[(1,)](memory[16:32], begin, valid, HOW=how)
    return memory


@pytest.mark.parametrize(("begin", "valid"), [(0, 16), (8, 16), (16, 16)], ids=["all", "half", "nothing"])
@pytest.mark.parametrize("how", ["load", "store", "add", "describe"])
def test_what_lies_in_the_tensors_of_a_launch_or_is_masked_is_allowed(how, begin, valid):
    memory = launch(how, begin, valid)
    assert memory[:16].count_nonzero() == memory[32:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("how", "begin", "valid", "text"),
    [
        ("load", 1, 17, "reads 4 bytes at byte 64 of x_ptr, which has 64"),
        ("load", -1, 16, "reads 4 bytes at byte -4 of x_ptr, which has 64"),
        ("store", 40, 48, "writes 4 bytes at byte 160 of x_ptr, which has 64"),
        ("add", 8, 20, "modifies 4 bytes at byte 64 of x_ptr, which has 64"),
        ("swap", 16, 16, "swaps 4 bytes at byte 64 of x_ptr, which has 64"),
        ("describe", 4, 18, "writes 4 bytes at byte 64 of x_ptr, which has 64"),
    ],
)
def test_what_lies_beside_them_is_refused_though_the_process_has_that_memory(how, begin, valid, text):
    with pytest.raises(InterpreterError, match=text):
        launch(how, begin, valid)
