"""That `persistent_matmul` is tuned for classes of rows, and right for all rows of a class."""

import pytest
import torch
from dense_runs import error_ratio
from gemm_runs import matrix

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from dist_autotune.kernels.gemm.configs import PLAIN_CANDIDATES, class_of_rows
from dist_autotune.kernels.gemm.operation import plain_gemm
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.persistent_gemm import persistent_matmul


def test_classes_of_rows_end_at_the_bounds_that_are_documented():
    some = {1: 16, 16: 16, 17: 32, 128: 128, 129: 160, 160: 160, 161: 192}
    assert {rows: class_of_rows(rows) for rows in some} == some
    assert sorted({class_of_rows(rows) for rows in range(129, 1025)}) == [
        *(160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    ]
    for rows in range(1, 5000):
        largest = class_of_rows(rows)
        assert rows <= largest == class_of_rows(largest)
        assert largest - rows < max(16, rows / 4)


def test_rows_of_one_class_are_benchmarked_once_and_every_product_is_right(monkeypatch):
    def do_bench(kernel_call, quantiles):
        kernel_call()
        return [1.0] * len(quantiles)

    monkeypatch.setattr(plain_gemm, "configs", PLAIN_CANDIDATES)
    monkeypatch.setattr(plain_gemm, "cache", {})
    monkeypatch.setattr(plain_gemm, "_do_bench", do_bench)
    monkeypatch.setitem(vars(plain_gemm), "do_bench", do_bench)
    b = matrix(40, 24, torch.float16)
    picked = []  # Triton 3.9 benchmarks nothing where pruning leaves one config
    for rows in (17, 18, 25, 31, 32, 33, 48, 19):
        a = matrix(rows, 40, torch.float16)
        before = len(plain_gemm.cache)
        assert error_ratio(persistent_matmul(a, b), a, b.T) < 1
        picked.append(len(plain_gemm.cache) > before)
    assert picked == [True, False, False, False, False, True, False, False]
    assert {key[0] for key in plain_gemm.cache} == {32, 48}


@pytest.mark.filterwarnings("ignore:.*has not been tuned")
@pytest.mark.parametrize("kind", [AllGatherGemm, GemmReduceScatter])
def test_overlapped_operations_are_tuned_for_classes_of_rows(kind, monkeypatch):
    kernel = {AllGatherGemm: all_gather_gemm, GemmReduceScatter: gemm_reduce_scatter}[kind]
    monkeypatch.setattr(kernel, "cache", {})
    weight = matrix(24, 40, torch.float16)
    with kind(200, 40 if kind is AllGatherGemm else 24, torch.float16, collective=False) as op:
        for rows in (129, 145, 160, 161, 192):
            a = matrix(rows, 40, torch.float16)
            assert error_ratio(op(a, weight), a, weight) < 1
    assert {key[0] for key in kernel.cache} == {160, 192}
