"""A GEMM beside an all-reduce: the config that is fastest alone does not make the step fastest.

    ./launch.sh examples/overlap.py [--rows M] [--columns N] [--k K] [--bucket-mib MIB]

A persistent GEMM on every SM keeps the all-reduce out until it ends. One that leaves a few SMs free is
slower itself, but the step ends sooner. So the same candidates (tiles, numbers of programs) are tuned three
times: the GEMM alone, the step by the GEMM's time in it, and the step by its whole run time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_autotune import TuningReport, contextual_autotune

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
TILES = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4)] if ON_GPU else [(16, 16, 16, 4, 1), (32, 16, 32, 4, 1)]
LEFT_FREE = (0, 8, 16, 24, 32) if ON_GPU else (0, 1, 2)  # SMs for the all-reduce
TIMED_STEPS = 30 if ON_GPU else 3


def candidates() -> list[triton.Config]:
    """Return every tile with every number of programs."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 4
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "NUM_SMS": sms - free},
            num_warps=warps,
            num_stages=stages,
        )
        for m, n, k, warps, stages in TILES
        for free in LEFT_FREE
    ]


@triton.autotune(candidates(), key=["M", "N", "K"])
@triton.jit
def persistent_gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SMS: tl.constexpr,
):
    """c [M, N] = a [M, K] @ b [N, K].T, all row-major; NUM_SMS programs share the tiles."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, NUM_SMS):
        offs_m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows beyond the edge read row 0: in bounds, and no mask in the K loop.
        a_ptrs = a_ptr + tl.where(offs_m < M, offs_m, 0)[:, None].to(tl.int64) * K
        b_ptrs = b_ptr + tl.where(offs_n < N, offs_n, 0)[None, :].to(tl.int64) * K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptrs + offs_k[None, :], mask=offs_k[None, :] < K, other=0.0)
            b = tl.load(b_ptrs + offs_k[:, None], mask=offs_k[:, None] < K, other=0.0)
            acc = tl.dot(a, b, acc)
        c_ptrs = c_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


class Step:
    """A GEMM and an all-reduce that do not need each other, as the backward pass of a layer has them."""

    def __init__(self, m: int, n: int, k: int, bucket_mib: float, device: torch.device) -> None:
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        self.a, self.b = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
        self.c = torch.empty(m, n, device=device, dtype=dtype)
        self.bucket = torch.randn(int(bucket_mib * 2**20) // dtype.itemsize, device=device, dtype=dtype)

    def gemm(self, config: triton.Config | None = None) -> None:
        """Launch the GEMM: the autotuned kernel, or the kernel under it with `config`."""
        (m, k), n = self.a.shape, self.b.shape[0]

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (min(meta["NUM_SMS"], triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),)

        kernel, options = (
            (persistent_gemm, {}) if config is None else (persistent_gemm.fn, config.all_kwargs())
        )
        kernel[grid](self.a, self.b, self.c, m, n, k, **options)

    def __call__(self, config: triton.Config | None = None) -> torch.Tensor:
        """Reduce the bucket over all ranks and multiply meanwhile; return the product."""
        reduction = dist.all_reduce(self.bucket, op=dist.ReduceOp.MAX, async_op=True)
        self.gemm(config)
        reduction.wait()  # on a GPU this orders streams, the host goes on
        return self.c

    def relative_error(self) -> float:
        """Return the error of the last product against float32, the largest of all ranks."""
        expected = self.a.float() @ self.b.float().T
        error = (self.c.float() - expected).norm() / expected.norm()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        return error.item()


def tuned_three_ways(step: Step, *, retune: bool = False) -> dict[str, TuningReport]:
    """Tune the same kernel alone and in the step, each time without the results of the others.

    `retune` ignores what the cache holds.
    """
    return {
        "alone": tuned(step.gemm, "GEMM alone", retune=retune),
        "in the step, by its own time": tuned(step, "by kernel time", retune=retune),
        "in the step, by run time": tuned(step, "by run time", retune=retune, objective="thunk"),
    }


def tuned(call: Callable[[], object], name: str, *, retune: bool, **options: Any) -> TuningReport:
    """Tune one call without the results of the others; return what was found."""
    function = contextual_autotune(is_dist=True, share=False, name=f"overlap: {name}", **options)(call)
    if retune:
        function.retune()
    function()
    persistent_gemm.cache.clear()  # where Triton keeps results, which the next tuning would respect
    assert function.report is not None
    return function.report


def picks_of(reports: dict[str, TuningReport]) -> dict[str, triton.Config]:
    """Return the config that each tuning has found."""
    return {name: report.contexts[0].config for name, report in reports.items()}


def slowest_ms(call: Callable[[], object]) -> float:
    """Return the median time of `call`, on the slowest rank."""
    times = []
    for _ in range(TIMED_STEPS):
        dist.barrier()
        if ON_GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host runs ahead meanwhile
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def label(config: triton.Config) -> str:
    block = config.kwargs
    return f"{block['BLOCK_M']} x {block['BLOCK_N']} x {block['BLOCK_K']}, {block['NUM_SMS']} programs"


def set_up() -> torch.device:
    """Join the process group that torchrun describes, on this rank's device."""
    if not ON_GPU:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192 if ON_GPU else 48)
    parser.add_argument("--columns", type=int, default=3584 if ON_GPU else 40)
    parser.add_argument("--k", type=int, default=8192 if ON_GPU else 32)
    parser.add_argument("--bucket-mib", type=float, default=256 if ON_GPU else 0.25)
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = set_up()
    step = Step(options.rows, options.columns, options.k, options.bucket_mib, device)
    rows, errors = [], []
    for name, pick in picks_of(tuned_three_ways(step)).items():
        gemm_ms = slowest_ms(lambda pick=pick: step.gemm(pick))
        step_ms = slowest_ms(lambda pick=pick: step(pick))
        rows.append((name, label(pick), gemm_ms, step_ms))
        errors.append(step.relative_error())
    error = max(errors)
    if dist.get_rank() == 0:
        shape = f"{options.rows} x {options.columns} x {options.k}"
        print(
            f"GEMM {shape} beside {options.bucket_mib:g} MiB of all-reduce on {dist.get_world_size()} ranks"
        )
        print(f"relative error of the products {error:.1e}")
        if not ON_GPU:
            print("(interpreter: this shows how it works; the times mean nothing)")
        print(f"{'tuned':<30}{'pick':<32}{'GEMM alone':>12}{'whole step':>12}")
        for name, pick, alone_ms, step_ms in rows:
            print(f"{name:<30}{pick:<32}{alone_ms:>9.3f} ms{step_ms:>9.3f} ms")
    if error > 2e-2:  # bf16 rounds to 3 digits; a wrong tile is off by 1
        raise SystemExit(f"wrong result: relative error {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
