"""That the interpreter as conftest leaves it prepares `triton.language` for each launch, and puts it back."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _twice(value):
    return _sum(value, value)


@triton.jit
def _sum(a, b):
    return tl.add(a, b)


@triton.jit
def double(in_ptr, out_ptr, FAILS: tl.constexpr):
    if FAILS:
        tl.static_assert(False, "it was to fail")
    tl.store(out_ptr, _twice(tl.load(in_ptr)))


def doubled(value: int, *, fails: bool = False, grid=(1,)) -> int:
    given, out = torch.tensor([value]), torch.tensor([0])
    double[grid](given, out, FAILS=fails)
    return int(out)


def test_nothing_stays_prepared_after_a_launch_whether_it_fails_or_not():
    names = ("load", "store", "add", "static_assert", "sum")
    before = [getattr(tl, name) for name in names]
    for _ in range(2):
        assert doubled(21) == 42
        with pytest.raises(InterpreterError, match="it was to fail"):
            doubled(21, fails=True)
        assert [getattr(tl, name) for name in names] == before


@triton.jit
def operate(halves_ptr, integers_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    halves, integers = tl.load(halves_ptr + offs), tl.load(integers_ptr + offs)
    ratio = halves / halves[:, None]
    tl.static_assert(ratio.dtype == tl.float32)  # neither half the quotients' precision nor that of a sum
    tl.static_assert((halves + halves).dtype == tl.float16)
    tl.static_assert((halves + integers).dtype == tl.float16)
    tl.static_assert((integers + offs).dtype == tl.int64)
    tl.static_assert((integers % integers).dtype == tl.int64)
    tl.static_assert((offs < 3).dtype == tl.int1)
    below = tl.where(offs < 3, integers - 1, 1 - integers)
    tl.store(out_ptr + offs[:, None] * BLOCK + offs, ratio * below)


def test_operands_are_converted_and_spread_as_by_the_stock_interpreter():
    halves, integers = torch.tensor([1.0, 2.0, 3.0, 5.0]).half(), torch.tensor([7, 8, 9, 10])
    out = torch.zeros(4, 4)
    for _ in range(2):  # with constants that are made, and kept
        operate[(1,)](halves, integers, out, BLOCK=4)
        below = torch.tensor([6, 7, 8, -9])
        torch.testing.assert_close(out, halves.float() / halves.float()[:, None] * below)


@triton.jit
def add_to_unsigned(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr) + -1)


def test_operands_that_do_not_go_together_are_still_refused():
    with pytest.raises(InterpreterError, match=r"negative scalar|out of range"):
        add_to_unsigned[(1,)](torch.zeros(1, dtype=torch.uint8))
