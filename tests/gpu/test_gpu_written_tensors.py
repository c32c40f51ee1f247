"""Tensors that kernels change in place, on a GPU: copies and launches keep the order of streams."""

import pytest
import torch
import triton
from kernels_for_tests import accumulate

from dist_autotune import contextual_autotune

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sign", ["restore_value", "reset_to_zero"])
def test_streams_and_replays_change_it_once(sign):
    n = 1 << 22
    configs = [triton.Config({"BLOCK": block}) for block in (128, 512, 1024, 2048)]
    kernel = triton.autotune(configs, ["n"], **{sign: ["y_ptr"]})(accumulate)
    x, y, side = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda"), torch.cuda.Stream()
    outputs = []

    @contextual_autotune(cache=False, progress=False)
    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)  # what follows would overtake it on the other stream
            kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
        torch.cuda.current_stream().wait_stream(side)
        own = torch.zeros(n, device="cuda")
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, own, n)
        outputs.append(own.sum())

    step()
    assert step.report.runs > 4
    assert torch.equal(y, x)
    assert all(int(total) == n for total in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    step()
    torch.cuda.synchronize()
    assert torch.equal(y, 3 * x)
