"""That the interpreter as conftest leaves it prepares `triton.language` for each launch, and puts it back."""

from __future__ import annotations

import threading

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


def test_a_launch_in_a_grid_function_leaves_the_outer_one_prepared():
    inner = []

    def grid(meta):
        inner.append(doubled(3))
        return (1,)

    assert doubled(5, grid=grid) == 10
    assert inner == [6]


def test_a_launch_on_another_thread_during_a_launch_is_prepared_by_itself():
    found = []

    def grid(meta):
        thread = threading.Thread(target=lambda: found.append(doubled(4)))
        thread.start()
        thread.join()
        return (1,)

    assert doubled(5, grid=grid) == 10
    assert found == [8]


def test_a_type_that_is_kept_is_taken_for_no_other():
    made = [tl.block_type(tl.float32, [tl.constexpr(4), 8]) for _ in range(2)]
    assert [str(each) for each in made] == ["<['4', '8'], fp32>"] * 2
    assert made[0] == made[1]
    assert (made[1].element_ty, made[1].numel) == (tl.float32, 32)
    assert tl.block_type(tl.float16, [4, 8]).element_ty is tl.float16
    for wrong in ([4.0, 8], [3, 8]):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.float32, wrong)
    pointers = [tl.block_type(tl.pointer_type(each, 1), [4, 8]) for each in (tl.float32, tl.float16)]
    assert [each.element_ty.element_ty for each in pointers] == [tl.float32, tl.float16]
    assert [str(tl.tuple(values).type) for values in ([1, 2], [True, 2])] == [
        str(tl.core.tuple_type([tl.core.constexpr_type(value) for value in values]))
        for values in ([1, 2], [True, 2])
    ]


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
