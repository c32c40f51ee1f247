"""Copies in padded scratch memory: right for all strides, chosen where they pay, and used as TMA would."""

import ctypes
import math

import pytest
import torch
from gemm_runs import always_copied, multiply
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.kernels.epilogues import Epilogue
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.matrices import Matrix

TYPES = [torch.float16, torch.bfloat16, torch.float32]
# The strides of a matrix, made of fresh memory: (rows, columns, type) -> tensor.
LAYOUTS = {
    "rows": lambda m, n, dtype: numbers(m, n, dtype),
    "columns": lambda m, n, dtype: numbers(n, m, dtype).T,
    "a part of rows": lambda m, n, dtype: numbers(m, n + 11, dtype)[:, 3 : 3 + n],
    "a part of columns": lambda m, n, dtype: numbers(n, m + 8, dtype)[:, 8:].T,
    "nothing contiguous": lambda m, n, dtype: numbers(2 * m, 3 * n, dtype)[::2, ::3],
    "one row, expanded": lambda m, n, dtype: numbers(1, n, dtype).expand(m, n),
}


pytestmark = pytest.mark.usefixtures("h200", "poisoned_rooms")


def numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, columns)).to(dtype)  # sums of 40 products are exact in all types


# ---- the copy


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 700), (600, 2), (33, 77), (9, 264)], ids=str)
def test_copies_there_and_back_write_the_matrix_s_own_places_only(size, dtype, poisoned_rooms):
    rows, columns = size
    source, constants = numbers(rows, columns, dtype), dict.fromkeys(("TRANS_A", "TRANS_B"), False)
    surroundings = torch.full((2 * rows + 1, 3 * columns + 2), math.nan, dtype=dtype)
    for target in (surroundings[1::2, 2::3], surroundings[:rows, 1 : 1 + columns]):
        plan = launching.LaunchPlan({}, constants, exchanged=False, a=None, b=None, out=None)
        room = plan.padded("A", source)[1]
        assert poisoned_rooms[-1][:, columns:].isnan().all()
        plan.copy("C", room, target)
        assert torch.equal(target, source)
        target.fill_(math.nan)
        assert surroundings.isnan().all()


def test_what_tma_cannot_address_is_copied_where_the_product_is_large():
    for sizes, is_copied in {
        (4001, 2003, 999): True,
        (1021, 1021, 1021): False,
        (1, 50001, 50001): False,
    }.items():
        m, n, k = sizes
        a, weight, out = (torch.empty(size, dtype=TYPES[0]) for size in ((m, k), (n, k), (m, n)))
        plan = launching.plan_launch(a, weight.T, out, "auto", 132, tensor_memory=False)
        assert (plan is not None and plan.a is plan.b is plan.out is None) is is_copied


# ---- the way to the launch, which here is done as TMA would


def memory_of(matrix: Matrix) -> torch.Tensor:
    """Return what TMA addresses, rows and columns as the tensor has them."""
    elements = (matrix.rows - 1) * matrix.pitch + matrix.columns
    memory = (ctypes.c_char * (elements * matrix.dtype.itemsize)).from_address(matrix.address)
    rows = torch.frombuffer(memory, dtype=matrix.dtype).as_strided(
        (matrix.rows, matrix.columns), (matrix.pitch, 1)
    )
    return rows.T if matrix.transposed else rows


def launch_as_tma(patched: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Have launches read and write memory as TMA does; return the list of their sizes."""
    launched: list[dict[str, int]] = []

    def launch(plan: launching.LaunchPlan, a: Matrix, b: Matrix, c: Matrix, epilogue: Epilogue) -> None:
        sizes, trans = plan.sizes, (plan.constants["TRANS_A"], plan.constants["TRANS_B"])
        launched.append(sizes)
        assert all(matrix.is_addressable() for matrix in (a, b, c))
        assert (a.transposed, b.transposed, c.transposed) == (*trans, False)
        left, right, result = map(memory_of, (a, b, c))
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        assert (left.shape, right.shape) == ((m, k), (k, n))
        result[:m] = left.double() @ right.double()

    patched.setattr(launching.LaunchPlan, "launch", launch)
    return launched


@settings(max_examples=30)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    layouts=st.tuples(*[st.sampled_from([*LAYOUTS])] * 2),
    out_layout=st.sampled_from([name for name in LAYOUTS if "expanded" not in name]),
    dtype=st.sampled_from(TYPES[:2]),
    out_dtype=st.sampled_from(TYPES),
)
def test_products_of_copies_are_right_for_all_strides(sizes, layouts, out_layout, dtype, out_dtype):
    m, n, k = sizes
    a, b = LAYOUTS[layouts[0]](m, k, dtype), LAYOUTS[layouts[1]](k, n, dtype)
    target = LAYOUTS[out_layout](m, n, out_dtype).fill_(math.nan)

    with pytest.MonkeyPatch.context() as patched:
        launched = launch_as_tma(patched)
        patched.setattr(launching, "copies_pay", always_copied)
        assert multiply(a, b, target)
    assert torch.equal(target.double(), a.double() @ b.double())
    assert len(launched) == 1
