"""The path from a call of persistent_matmul to a launch, on a device that compiles and does not run."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from gemm_compiled import candidate
from gemm_runs import multiply
from launch_path import launching as launching_on

from dist_autotune.kernels import tensors
from dist_autotune.kernels.epilogues import Epilogue
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm import operation
from dist_autotune.kernels.gemm.configs import blocks_of
from dist_autotune.kernels.matrices import LINE_BYTES
from dist_autotune.kernels.persistent_gemm import persistent_matmul


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    config = candidate("pipelined", BLOCK_N=64)
    with launching_on(monkeypatch, launching, launching.tuned_gemm, [config], blocks_of) as made:
        yield made


def zeros(rows: int, columns: int) -> torch.Tensor:
    """Return a matrix that begins where a GPU's does, at a multiple of a cache line."""
    room = torch.zeros(rows * columns + LINE_BYTES // 2, dtype=torch.float16)
    return room[-room.data_ptr() % LINE_BYTES // 2 :][: rows * columns].view(rows, columns)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (zeros(m, k), zeros(k, n), zeros(m, n))


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_a_result_by_columns_is_the_transposed_product_whose_rows_have_what_is_of_columns(by_columns, device):
    a, b, out = operands(256, 192, 64)
    out = zeros(192, 256).T if by_columns else out
    bias, scale_a, scale_b = (torch.zeros(size) for size in (192, 256, 192))
    ending = Epilogue(bias, "silu", scale_a, scale_b)
    multiply(a, b, out, epilogue=ending, times=2)  # asked of the tuner, then the short way
    first, second = (each.arguments for each in device.launches)
    of_rows, of_columns = (scale_a.data_ptr(), None), (scale_b.data_ptr(), bias.data_ptr())
    sizes, factors = [256, 192, 64], [a, b, b, out]
    if by_columns:
        of_rows, of_columns, sizes, factors = of_columns, of_rows, [192, 256, 64], [b, a, a, out]
    assert [descriptor[0] for descriptor in first[:4]] == [tensor.data_ptr() for tensor in factors]
    assert first[4:11] == [of_rows[0], of_columns[0], of_rows[1], of_columns[1], *sizes]
    assert first == second


def test_calls_that_differ_in_their_epilogue_alone_launch_other_kernels(device):
    a, b, out = operands(256, 192, 64)
    bias = zeros(1, 192)[0]
    endings = [Epilogue(), Epilogue(bias), Epilogue(bias.float()), Epilogue(activation="relu")]
    for epilogue in endings:
        multiply(a, b, out, epilogue=epilogue)
    assert len({launched.received[4:6] for launched in device.launches}) == len(endings)


# ---- what is known of tensors in their places


@pytest.fixture
def on_gpu(device, monkeypatch) -> Any:
    """Have `persistent_matmul` take tensors for a GPU's; return A's shape of each launch that is planned."""
    found: list[tuple[int, ...]] = []

    def noted(a: torch.Tensor, *given: Any, **options: Any) -> launching.LaunchPlan | None:
        found.append(tuple(a.shape))
        return launching.plan_launch(a, *given, **options)

    monkeypatch.setattr(operation, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(operation, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(operation, "_device", lambda device: (9, 132))
    monkeypatch.setattr(operation, "_PLANS", {})
    monkeypatch.setattr(operation, "plan_launch", noted)
    monkeypatch.setattr(operation, "_plan_plain", lambda *_: lambda *_: None)
    return found


def test_tensors_that_lie_otherwise_in_the_same_place_are_others(device, on_gpu):
    a, b, out = operands(256, 192, 64)
    persistent_matmul(a, b, out)
    persistent_matmul(a[:128], b, out[:128])
    persistent_matmul(a.view(torch.bfloat16), b.view(torch.bfloat16), out.view(torch.bfloat16))
    persistent_matmul(out[:, :64], b, a.new_zeros(256, 192))
    assert len(on_gpu) == 4
    assert [launched.arguments[8] for launched in device.launches] == [256, 128, 256, 256]


def test_routes_are_bounded_and_keep_no_tensor(on_gpu, device, monkeypatch):
    monkeypatch.setattr(tensors, "KEPT", 2)
    calls = [operands(256, 192, 64 * size) for size in range(1, 5)]
    for each in calls:
        persistent_matmul(*each)
    assert len(operation._PLANS) == 2
    kept = [weakref.ref(tensor) for each in calls for tensor in each]
    device.launches.clear()
    calls.clear()
    del each
    gc.collect()
    assert [ref() for ref in kept] == [None] * 12
