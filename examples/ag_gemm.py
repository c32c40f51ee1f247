"""Allgather-GEMM, tuned in context by all ranks to one agreed config. The second start comes from the cache.

    ./launch.sh examples/ag_gemm.py [--rows ROWS] [--columns N] [--k K]

Each rank holds a shard of the activations and a slice of the weight. `AllGatherGemm` copies the peers' shards
while a persistent kernel multiplies its own. That kernel waits for its peers, so it cannot be timed alone on
one GPU; it is tuned inside `layer()`. Then the host's choices are tuned by the time of the whole run: the
consumer, the pieces of a shard, the number of programs.
"""

from __future__ import annotations

import argparse
import os
import re

import torch
import torch.distributed as dist
import triton

from dist_autotune import TuningReport, contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm

UNSET = re.compile(r", \w+: None")  # options that a config leaves to Triton
ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Allgather-GEMM, tuned in context.")
    parser.add_argument("--rows", type=int, default=4096 if ON_GPU else 48, help="rows of x on each rank")
    parser.add_argument("--columns", type=int, default=3584 if ON_GPU else 96, help="columns on each rank")
    parser.add_argument("--k", type=int, default=8192 if ON_GPU else 64)
    return parser.parse_args()


def set_up() -> torch.device:
    """Join the process group that torchrun describes, on this rank's device."""
    if not ON_GPU:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def check(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Return the relative error of `y` against all_gather + matmul in float32, the largest of all ranks."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    expected = torch.cat(shards).float() @ w.float().T
    error = (y.float() - expected).norm() / expected.norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def show(report: TuningReport) -> None:
    """Print what was tried, fastest first, then the report: the winners and their spread over ranks."""
    if all(context.status == "cached" for context in report.contexts):
        print("everything came from the cache: 1 run, nothing tried")
    else:
        print(f"{report.runs} runs, all of them right")
    for context in report.contexts:
        if context.status == "cached":
            continue
        print(f"{context.kernel}: {len(context.timings) + len(context.banned)} candidates")
        for config, ms in sorted(context.timings.items(), key=lambda item: item[1]):
            print(f"  {ms:9.3f} ms  {UNSET.sub('', config)}")
        for config, reason in context.banned.items():
            print(f"     banned    {config}: {reason}")
    print(report)


def main() -> None:
    options = parse()
    device = set_up()
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x = torch.randn(options.rows, options.k, device=device, dtype=dtype)
    w = torch.randn(options.columns, options.k, device=device, dtype=dtype)

    with AllGatherGemm(options.rows, options.k, dtype) as op:

        @contextual_autotune(is_dist=True, name="ag_gemm example")
        def layer() -> torch.Tensor:
            return op(x, w)

        y = layer()
        error = check(y, x, w)
        report = layer.report
        assert report is not None
        if dist.get_rank() == 0:
            show(report)
            ranks = f"{dist.get_world_size()} ranks, symmetric memory: {op.backend}"
            print(f"equals all_gather + matmul: relative error {error:.1e} on {ranks}")
        if error > 2e-2:  # bf16 rounds to 3 digits; a wrong or stale tile is off by 1
            raise SystemExit(f"wrong result: relative error {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
