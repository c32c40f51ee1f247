"""What an `AllGatherGemm` takes for known, and that nothing is taken for known that is not."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from dense_runs import error_ratio

from dist_autotune.kernels.ag_gemm import AllGatherGemm

CAPACITY, K, N = 16, 32, 24


@pytest.fixture
def op() -> Iterator[AllGatherGemm]:
    """An operation of this process alone."""
    with AllGatherGemm(CAPACITY, K, torch.float32, collective=True) as opened:
        yield opened


def weight_of(columns: int = N) -> torch.Tensor:
    return torch.randn(columns, K)


def is_right(op: AllGatherGemm, a_shard: torch.Tensor, weight: torch.Tensor, **options: torch.Tensor) -> bool:
    out = op(a_shard, weight, **options)
    return error_ratio(out, a_shard, weight) < 1


CHANGES = {
    "another type": (lambda tensor: tensor.view(torch.int32), ValueError, "was opened for torch.float32"),
    "another shape": (lambda tensor: tensor.view(K, -1), ValueError, "must both have K=32 columns"),
    "other strides": (
        lambda tensor: tensor.as_strided((N // 4, K), (2, N)),
        ValueError,
        "neither the rows nor",
    ),
    "three dimensions": (lambda tensor: tensor[None], ValueError, "two dimensions are needed"),
    "no tensor": (lambda tensor: tensor.tolist(), TypeError, "weight is a list; a tensor is needed"),
    "nothing": (lambda tensor: None, TypeError, "weight is a NoneType; a tensor is needed"),
}


@pytest.mark.parametrize(("change", "error", "text"), CHANGES.values(), ids=CHANGES)
def test_what_lies_in_the_same_place_in_another_way_is_checked(op, change, error, text):
    a_shard, weight = torch.randn(8, K), weight_of()
    for _ in range(2):
        assert is_right(op, a_shard, weight)
        with pytest.raises(error, match=text):
            op(a_shard, change(weight))


def test_no_tensor_of_a_caller_is_kept(op):
    tensors = [torch.randn(8, K), weight_of(), torch.empty(8, N)]
    for _ in range(2):
        op(*tensors)
    kept = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
