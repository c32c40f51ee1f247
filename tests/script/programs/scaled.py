"""A linear layer whose elementwise part is an autotuned Triton kernel, forward and backward."""

import os

import torch
import triton
import triton.language as tl

DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
# With one block stock Triton does not benchmark, which it cannot without a GPU.
BLOCKS = [int(block) for block in os.environ.get("BLOCKS", "16 32 64").split()]


@triton.autotune([triton.Config({"BLOCK": block}) for block in BLOCKS], key=["n"])
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * factor, mask=offs < n)


def scale(x, factor):
    x = x.contiguous()
    y = torch.empty_like(x)
    scale_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), factor)
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return scale(x, factor)

    @staticmethod
    def backward(ctx, gradient):
        return scale(gradient, ctx.factor), None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.tanh(Scale.apply(self.first(x), 2.0)))


def batches(rank=0, steps=12):
    """Yield (x, y), other ones on each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        x = torch.randn(8, 8, generator=generator)
        yield x, x.sum(1, keepdim=True)
