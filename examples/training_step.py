"""A training step, tuned while it trains, one trial per step. Data-parallel on all ranks.

    ./launch.sh examples/training_step.py [--steps STEPS] [--batch ROWS] [--width WIDTH]

With `mode="online"` each call of `step` is one run: whatever config is on trial, the step is a real one, with
its forward and backward kernels, its all-reduce and its update. Autograd launches the backward kernels from a
thread of its own. While tuning, the host stays at most two steps ahead of the device. Once `step.settled` is
true, nothing is left to try, and a graph could be captured.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch._dynamo  # before the process group, see docs/troubleshooting.md: a rank aborts at its exit
import torch.distributed as dist
import triton
import triton.language as tl

from dist_autotune import contextual_autotune

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
CANDIDATES = (
    [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=3)
        for m, n, k, warps in ((128, 128, 64, 8), (128, 128, 32, 4), (128, 64, 64, 4), (64, 64, 64, 4))
    ]
    if ON_GPU
    else [triton.Config({"BLOCK_M": m, "BLOCK_N": m, "BLOCK_K": m}) for m in (16, 32, 64)]
)


@triton.autotune(CANDIDATES, key=["M", "N", "K", "stride_ak", "stride_bk"])
@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c = a @ b for a [M, K] and b [K, N] of any strides, c row-major; one program computes one tile."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
        b_ptrs = b_ptr + inner[:, None] * stride_bk + cols[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < K), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty((m, n))
    matmul_kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
        a, b, c, m, n, k, *a.stride(), *b.stride()
    )
    return c


class Multiply(torch.autograd.Function):
    """x @ w, with both gradients computed by the same tuned kernel."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return matmul(x, w)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return matmul(grad, w.T), matmul(x.T, grad)


class Mlp(torch.nn.Module):
    """Two layers: width -> 2 * width -> width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.randn(width, 2 * width) / width**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Multiply.apply(torch.relu(Multiply.apply(x, self.w1)), self.w2)


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
    parser = argparse.ArgumentParser(description="A training step, tuned while it trains.")
    parser.add_argument("--steps", type=int, default=5000 if ON_GPU else 60)
    parser.add_argument("--batch", type=int, default=4096 if ON_GPU else 48, help="rows on each rank")
    parser.add_argument("--width", type=int, default=2048 if ON_GPU else 32)
    return parser.parse_args()


def are_equal_on_all_ranks(model: torch.nn.Module) -> bool:
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    largest = sums.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return torch.equal(sums, largest)


def main() -> None:
    options = parse()
    device = set_up()
    torch.manual_seed(0)  # the same weights on all ranks
    teacher, student = Mlp(options.width).to(device), Mlp(options.width).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3 if ON_GPU else 1e-2)
    torch.manual_seed(1 + dist.get_rank())  # other data on each

    @contextual_autotune(is_dist=True, mode="online", name="training step example")
    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(student(x), wanted)
        loss.backward()
        for parameter in student.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(options.batch, options.width, device=device)
        return x, torch.relu(x @ teacher.w1) @ teacher.w2

    settled_after, losses = 0, []
    for number in range(1, options.steps + 1):
        losses.append(step(*batch()))
        if step.settled and not settled_after:
            settled_after = number
    if step.settled:  # then launches outside of it take what it has found
        with torch.no_grad():
            x, wanted = batch()
            losses.append(torch.nn.functional.mse_loss(student(x), wanted))
    first, left = losses[0].item(), losses[-1].item()
    if dist.get_rank() == 0:
        print(step.report)
        when = f"settled after step {settled_after}" if settled_after else "still being tuned"
        print(f"{options.steps} steps, {when}; loss {first:.3f} at first, {left:.3f} at the end")
    if not (are_equal_on_all_ranks(student) and left < first):
        raise SystemExit(f"rank {dist.get_rank()}: weights differ between ranks, or nothing was learnt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
