"""`persistent_matmul` against float32 in the interpreter, where the plain body runs; how wrong calls end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_runs import check, layouts_and_types, matrix, poisoned, schedules
from operation_runs import DEVICE

from dist_autotune.kernels.gemm.configs import PLAIN_CANDIDATES
from dist_autotune.kernels.gemm.operation import plain_gemm
from dist_autotune.kernels.persistent_gemm import VARIANTS, persistent_matmul

# ---- the plain body, through the public function

TINY = [(1, 1, 1), (1, 33, 7), (33, 1, 65), (5, 3, 1), (31, 33, 63), (64, 64, 64)]
CALLS = {f"{shape}": (shape, {}) for shape in TINY}
CALLS |= schedules(97, 130, 20, programs=(1, 3, 40)) | layouts_and_types(37, 45, 29)
CALLS |= {f"{variant}, where there is no TMA": ((40, 50, 60), {"variant": variant}) for variant in VARIANTS}


@pytest.mark.parametrize(("shape", "options"), CALLS.values(), ids=CALLS)
def test_any_shape_layout_type_schedule_and_variant_gives_the_product(shape, options):
    check(*shape, **options)


@pytest.mark.parametrize("candidate", PLAIN_CANDIDATES, ids=str)
def test_every_candidate_of_the_plain_body_is_right(candidate, monkeypatch):
    monkeypatch.setattr(plain_gemm, "configs", [candidate])
    check(70, 90, 50, torch.bfloat16)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)], ids=str)
def test_empty_shapes(shape):
    m, n, k = shape
    a, b = matrix(m, k, torch.float16), matrix(k, n, torch.float16)
    out = poisoned(m, n, torch.float16)
    assert torch.equal(persistent_matmul(a, b, out), torch.zeros_like(out))
    assert persistent_matmul(a, b).shape == (m, n)


def test_the_result_has_the_type_of_a_or_the_one_asked_for():
    a, b = matrix(8, 8, torch.bfloat16), matrix(8, 8, torch.bfloat16)
    assert persistent_matmul(a, b).dtype is torch.bfloat16
    assert persistent_matmul(a, b, out_dtype=torch.float32).dtype is torch.float32


# ---- wrong calls


def half(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, device=DEVICE, **options)


def product(*shapes: tuple[int, ...], **options: Any) -> Callable[[], Any]:
    return lambda: persistent_matmul(*(half(*shape) for shape in shapes), **options)


AB = ((2, 3), (3, 5))
WRONG: dict[type[Exception], dict[str, Callable[[], Any]]] = {
    ValueError: {
        r"a has shape \(2, 3, 4\)": product((2, 3, 4), (4, 5)),
        "a has 3 columns, b has 4 rows": product((2, 3), (4, 5)),
        r"\(2, 5\)": product(*AB, (2, 4)),
        r"strides \(0, 1\)": lambda: persistent_matmul(half(2, 3), half(3, 5), half(1, 5).expand(2, 5)),
        r"shape \[2, 5\] and strides \(4, 1\): elements overlap": lambda: persistent_matmul(
            half(2, 3), half(3, 5), half(10).as_strided((2, 5), (4, 1))
        ),
        "out overlaps a": lambda: persistent_matmul((whole := half(5, 12))[:, :5], half(5, 5), whole[:, 4:9]),
        "out overlaps b": lambda: persistent_matmul(
            half(5, 5), (whole := half(5, 12))[:, :5].T, whole[:, 4:9]
        ),
        "out overlaps bias": lambda: persistent_matmul(
            half(2, 3), half(3, 5), (whole := half(14))[:10].view(2, 5), bias=whole[9:]
        ),
        "out overlaps scale_b": lambda: persistent_matmul(
            half(2, 3),
            half(3, 5),
            (whole := half(20))[:10].view(2, 5),
            scale_b=whole[8:18].view(torch.float32),
        ),
        "no variant 'fast'; there are 'auto', 'pipelined'": product(*AB, variant="fast"),
        "no scheduler 'random'": product(*AB, scheduler="random"),
        "programs is 0": product(*AB, programs=0),
        "b is on meta; move": lambda: persistent_matmul(half(2, 3), half(3, 5).to("meta")),
    },
    TypeError: {
        "a is torch.int32": lambda: persistent_matmul(half(2, 3).int(), half(3, 5)),
        "b is torch.bfloat16": lambda: persistent_matmul(half(2, 3), half(3, 5).bfloat16()),
        "torch.float64": lambda: persistent_matmul(half(2, 3), half(3, 5), half(2, 5).double()),
        "torch.int8": product(*AB, out_dtype=torch.int8),
        "leave one of them out": product(*AB, (2, 5), out_dtype=torch.float32),
        "programs is 2.5; it must be a whole number": product(*AB, programs=2.5),
        "a is a list": lambda: persistent_matmul([[1.0]], half(1, 5)),
        "out is a list": lambda: persistent_matmul(half(2, 3), half(3, 5), [1]),
    },
}


@pytest.mark.parametrize(("kind", "told"), [(kind, told) for kind, every in WRONG.items() for told in every])
def test_a_wrong_call_is_told_with_its_values(kind, told):
    with pytest.raises(kind, match=told):
        WRONG[kind][told]()


def test_a_result_may_lie_beside_an_operand():
    whole, a = (torch.randn(6, size, device=DEVICE).half() for size in (20, 8))
    b = whole[:, :8].T
    for out in (whole[:, 8:14], whole[:, 8:].view(torch.float32)):
        persistent_matmul(a, b, out)
        torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-3)
