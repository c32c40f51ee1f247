"""What the Gluon body of `persistent_matmul` computes on a GPU: every variant, layout, type and copy."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_runs import error_ratio
from gemm_runs import HALVES, LAYOUTS, always_copied, check, fitting, layouts_and_types, matrix, poisoned
from gpu_cases import covering

from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm import operation
from dist_autotune.kernels.gemm.pruning import is_wanted
from dist_autotune.kernels.persistent_gemm import VARIANTS, persistent_matmul

KINDS = [name for name in VARIANTS if name != "auto"]


def each_candidate(variant: str, out_dtype: torch.dtype) -> list[Any]:
    """Return the candidates of a variant that fit this GPU."""
    return fitting(out_dtype, lambda kwargs: is_wanted(kwargs, variant))


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that leaves the Gluon body one candidate; a call that falls back then fails."""

    def choose(config: Any) -> None:
        monkeypatch.setattr(launching.tuned_gemm, "configs", [config])
        monkeypatch.setattr(operation, "_plan_plain", lambda *_: pytest.fail("the plain body was used"))
        monkeypatch.setattr(launching, "copies_pay", always_copied)
        monkeypatch.setattr(operation, "_PLANS", {})  # it is asked for tensors in known places, too

    return choose


GPU_SHAPES = [(208, 416, 304), (2000, 1000, 2000), (1024, 1024, 8), (128, 256, 64), (1, 8, 8), (8, 8, 4096)]
GPU_SHAPES += [(4104, 3336, 1032)]  # several waves of every tile; rows begin between cache lines


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("variant", KINDS)
def test_every_candidate_on_a_gpu(variant, dtype, only):
    for config in covering(each_candidate(variant, dtype)):
        only(config)
        options = {"variant": variant, "layouts": ("row", "column" if config.kwargs["JOINED"] else "row")}
        for shape in GPU_SHAPES:
            check(*shape, dtype, **options)
            check(*shape, dtype, **options)  # by the short way, with new inputs


ON_A_GPU = layouts_and_types(520, 264, 200)
ON_A_GPU |= {f"{programs} programs": ((1500, 1304, 136), {"programs": programs}) for programs in (1, 7)}


@pytest.mark.gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(("shape", "options"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_each_variant_takes_all_layouts_types_and_programs_on_a_gpu(shape, options, variant, only):
    for config in each_candidate(variant, options.get("out_dtype", torch.float16))[:1]:
        only(config)
        check(*shape, variant=variant, **options)


ROUTES = {"TMA": (1024, 768, 512), "copies": (999, 333, 501)}


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """Return a GPU test that does nothing on other GPUs, as nothing is copied there."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if fixtures.get("shape") == ROUTES["TMA"] or torch.cuda.get_device_capability()[0] == 9:
            test(**fixtures)

    return pytest.mark.gpu(run)


@on_hopper
@pytest.mark.parametrize("shape", ROUTES.values(), ids=ROUTES)
def test_a_captured_call_follows_its_inputs(shape, only):
    m, n, k = shape
    only(each_candidate("warp_specialized", torch.bfloat16)[0])
    a, b = matrix(m, k, torch.bfloat16), matrix(n, k, torch.bfloat16).T
    outs = [poisoned(m, n, torch.bfloat16) for _ in range(3)]
    persistent_matmul(a, b, outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:  # in the graph's memory one room may follow the other
            persistent_matmul(a, b, out)
    for _ in range(3):
        for tensor in (a, b):
            tensor.normal_()
        for out in outs:
            out.fill_(math.nan)
        others = [poisoned(m, k, torch.bfloat16) for _ in range(8)]
        graph.replay()
        assert max(error_ratio(out, a, b.T) for out in outs) < 1
        assert all(other.isnan().all() for other in others)  # the scratch memory is the graph's own
        del others


@on_hopper
@pytest.mark.parametrize("shape", ROUTES.values(), ids=ROUTES)
def test_back_to_back_calls_on_two_streams_share_no_scratch_memory(shape, only):
    m, n, k = shape
    only(each_candidate("warp_specialized", torch.float16)[0])
    inputs = [(matrix(m, k, torch.float16), matrix(k, n, torch.float16)) for _ in range(2)]
    outs = [poisoned(m, n, torch.float16) for _ in range(20)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        with torch.cuda.stream(streams[number % 2]):
            persistent_matmul(*inputs[number % 2], out)
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        a, b = inputs[number % 2]
        assert error_ratio(out, a, b.T) < 1


# ---- on a GPU, through scratch memory

PAIRS = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
ODD_SHAPES = [(1, 1, 1), (33, 45, 29), (999, 333, 501), (2001, 1003, 7), (257, 4099, 1030), (1030, 518, 66)]
WITH_LAYOUTS = pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
OF_EACH_LOOP = pytest.mark.parametrize("variant", ["pipelined", "warp_specialized"])


@on_hopper
@WITH_LAYOUTS
@OF_EACH_LOOP
def test_what_tma_cannot_address_goes_through_scratch_memory_on_a_gpu(variant, layouts, only, poisoned_rooms):
    for (dtype, out_dtype), shape in itertools.product(PAIRS, ODD_SHAPES):
        only(each_candidate(variant, out_dtype)[0])
        for _ in range(2):
            check(*shape, dtype, layouts=layouts, out_dtype=out_dtype, variant=variant)
    assert poisoned_rooms
