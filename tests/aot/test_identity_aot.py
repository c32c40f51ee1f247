"""What a kernel is made of, where the interpreter knows less of it than the compiler."""

import pytest

from dist_autotune.triton_api.identity import candidate_digest, kernel_source

MODULE = """
import triton
import triton.language as tl
from triton.language import core

aggregate = getattr(core, "aggregate", None) or core._aggregate

@triton.jit
def called(x):
    return x {called}

@aggregate
class Tile:
    value: tl.tensor

    def __init__(self, value):
        self.value = value

    @triton.jit
    def doubled(self):
        return called(self.value) * {factor}

@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, Tile(tl.load(x_ptr)).doubled())
"""
DEFAULTS = {"factor": 2, "called": "+ 1"}


@pytest.mark.parametrize(
    "change", [{"factor": 3}, {"called": "+ 2"}], ids=["a method", "a function that a method calls"]
)
def test_the_methods_of_an_aggregate_are_part_of_the_kernels_that_use_it(import_kernels, change):
    parts = DEFAULTS, DEFAULTS, DEFAULTS | change
    one, same, other = (import_kernels(MODULE.format(**each)) for each in parts)
    digests = [kernel_source(loaded.kernel.fn).digest for loaded in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    as_option = [candidate_digest({"TILE": loaded.Tile}) for loaded in (one, same, other)]
    assert as_option[0] == as_option[1] != as_option[2]
