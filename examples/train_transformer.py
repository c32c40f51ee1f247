"""A transformer trained with tensor parallelism, every kernel of its step tuned while it trains.

    ./launch.sh examples/train_transformer.py [--dp RANKS] [--steps STEPS] [--tokens LENGTH]
    ./launch.sh --nproc 4 examples/train_transformer.py --dp 2

`parallelize` splits the projections over the ranks of the mesh's "tp" dimension, with FSDP2 on "dp". One
decorator tunes the overlapped products, this file's own kernels (norm, rotary embedding, cross-entropy) and
how many CTAs the collectives of FSDP2 take on GPUs, forward and backward, one trial per step. Beside it each
rank trains the same model in plain torch on all tokens for CHECKED_STEPS: their losses must agree, within
TOLERANCE.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo  # before the process group, see docs/troubleshooting.md: a rank aborts at its exit
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dist_autotune import contextual_autotune
from dist_autotune.kernels import tp

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 0.02 if ON_GPU else 1e-3  # of a loss, relative: products are rounded to DTYPE in another order
CHECKED_STEPS = (
    50  # later, two runs of plain torch differ by more: their rounding decides where training goes
)
BASE = 10000.0  # of the rotary embedding's wavelengths
# Of the small kernels: how many rows a program takes at once, or columns of the logits of one row.
ROWS = [
    triton.Config({"ROWS": rows}, num_warps=warps)
    for rows, warps in (((1, 4), (1, 8), (2, 8), (4, 8)) if ON_GPU else ((32, 4), (8, 4)))
]
COLUMNS = [
    triton.Config({"BLOCK": block}, num_warps=8) for block in ((4096, 2048, 8192) if ON_GPU else (64, 32))
]


# ---- root mean square norm


@triton.autotune(ROWS, key=["N"])
@triton.jit
def norm_kernel(x_ptr, weight_ptr, y_ptr, scale_ptr, M, N, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """y = x * weight / rms(x) for ROWS rows; `scale` keeps 1 / rms."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    places = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps)
    tl.store(y_ptr + places, (x * scale[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)


@triton.autotune(ROWS, key=["N"])
@triton.jit
def norm_backward_kernel(
    x_ptr, weight_ptr, scale_ptr, dy_ptr, dx_ptr, dweight_ptr, M, N, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """dx of every row, and the sum over a program's rows of what belongs to dweight."""
    cols = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        places = rows[:, None] * N + cols[None, :]
        scale = tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]
        normed = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + places, mask=mask, other=0.0).to(tl.float32)
        dweight += tl.sum(dy * normed, axis=0)
        dnormed = dy * weight[None, :]
        dx = (dnormed - normed * (tl.sum(dnormed * normed, axis=1) / N)[:, None]) * scale
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + tl.program_id(0) * N + cols, dweight, mask=cols < N)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        n = x.shape[-1]
        m = x.numel() // n
        y, scale = torch.empty_like(x), x.new_empty(m, dtype=torch.float32)
        norm_kernel[lambda meta: (triton.cdiv(m, meta["ROWS"]),)](
            x, weight, y, scale, m, n, eps, BLOCK=triton.next_power_of_2(n)
        )
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        n, programs = x.shape[-1], 256 if ON_GPU else 1
        dx, dweight = torch.empty_like(x), x.new_empty((programs, n), dtype=torch.float32)
        norm_backward_kernel[(programs,)](
            x, weight, scale, dy.contiguous(), dx, dweight, scale.numel(), n, BLOCK=triton.next_power_of_2(n)
        )
        return dx, dweight.sum(0).to(weight.dtype), None


# ---- rotary embedding


@triton.autotune(ROWS, key=["HEADS"])
@triton.jit
def rotary_kernel(
    x_ptr,
    y_ptr,
    angles_ptr,
    stride_b,
    stride_s,
    sign,
    M,
    LENGTH,
    HEADS,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn each pair (i, i + HALF) of M rows, a token's HEADS after each other; sign = -1 turns it back."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens, heads = rows // HEADS, rows % HEADS
    halves = tl.arange(0, HALF)
    mask = (rows < M)[:, None] & (halves >= 0)[None, :]
    begins = (tokens // LENGTH).to(tl.int64) * stride_b + (tokens % LENGTH).to(tl.int64) * stride_s
    from_ptr = x_ptr + (begins + heads * 2 * HALF)[:, None] + halves[None, :]
    to_ptr = y_ptr + (rows.to(tl.int64) * 2 * HALF)[:, None] + halves[None, :]
    angles = tl.load(angles_ptr + (tokens % LENGTH * HALF)[:, None] + halves[None, :], mask=mask, other=0.0)
    cos, sin = tl.cos(angles), tl.sin(angles) * sign
    left = tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(from_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_ptr, (left * cos - right * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr + HALF, (right * cos + left * sin).to(y_ptr.dtype.element_ty), mask=mask)


def turn(x: Tensor, angles: Tensor, sign: float) -> Tensor:
    sequences, length, heads, size = x.shape
    if x.stride(-1) != 1 or x.stride(2) != size:
        x = x.contiguous()
    y, m = x.new_empty(x.shape), sequences * length * heads
    rotary_kernel[lambda meta: (triton.cdiv(m, meta["ROWS"]),)](
        x, y, angles, x.stride(0), x.stride(1), sign, m, length, heads, size // 2
    )
    return y


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return turn(x, angles, 1.0)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return turn(dy, *ctx.saved_tensors, -1.0), None


# ---- cross-entropy


@triton.autotune(COLUMNS, key=["V"])
@triton.jit
def cross_entropy_kernel(logits_ptr, labels_ptr, losses_ptr, norms_ptr, V, BLOCK: tl.constexpr):
    """The loss of one row, and the logarithm of its sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    largest, total = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        part = tl.load(logits_ptr + row * V + start + cols, mask=start + cols < V, other=-float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(part.to(tl.float32), axis=0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(part.to(tl.float32) - largest), axis=0)
    norm = largest + tl.log(total)
    of_label = tl.load(logits_ptr + row * V + tl.load(labels_ptr + row)).to(tl.float32)
    tl.store(losses_ptr + row, norm - of_label)
    tl.store(norms_ptr + row, norm)


@triton.autotune(COLUMNS, key=["V"])
@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr, labels_ptr, norms_ptr, scale_ptr, grads_ptr, V, BLOCK: tl.constexpr
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    part = tl.load(logits_ptr + row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
    grads = tl.exp(part - tl.load(norms_ptr + row)) - tl.where(cols == tl.load(labels_ptr + row), 1.0, 0.0)
    grads = grads * tl.load(scale_ptr)
    tl.store(grads_ptr + row * V + cols, grads.to(grads_ptr.dtype.element_ty), mask=cols < V)


class CrossEntropy(torch.autograd.Function):
    """The mean over rows."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        rows, v = logits.shape
        losses, norms = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
        cross_entropy_kernel[(rows,)](logits, labels, losses, norms, v)
        ctx.save_for_backward(logits, labels, norms)
        return losses.mean()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, norms = ctx.saved_tensors
        rows, v = logits.shape
        grads, scale = torch.empty_like(logits), (grad / rows).float().reshape(1)
        cross_entropy_backward_kernel[lambda meta: (rows, triton.cdiv(v, meta["BLOCK"]))](
            logits, labels, norms, scale, grads, v
        )
        return grads, None


# ---- the model, in plain torch or with the kernels above


@dataclass(frozen=True)
class Functions:
    norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]


def plain_rotary(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


PLAIN = Functions(
    lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    plain_rotary,
    lambda logits, labels: F.cross_entropy(logits.float(), labels),
)
TRITON = Functions(Norm.apply, Rotary.apply, CrossEntropy.apply)


@dataclass(frozen=True)
class Shape:
    """Of the public 8B model's layers, at reduced depth; small for the interpreter."""

    width: int = 4096 if ON_GPU else 32
    heads: int = 32 if ON_GPU else 4
    kv_heads: int = 8 if ON_GPU else 2
    hidden: int = 14336 if ON_GPU else 64
    vocabulary: int = 128256 if ON_GPU else 64
    depth: int = 2 if ON_GPU else 1


class RMSNorm(nn.Module):
    def __init__(self, width: int, functions: Functions) -> None:
        super().__init__()
        self.weight, self.functions = nn.Parameter(torch.ones(width)), functions

    def forward(self, x: Tensor) -> Tensor:
        return self.functions.norm(x, self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, shape: Shape, functions: Functions) -> None:
        super().__init__()
        self.functions, self.head_dim = functions, shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk, self.wv = (
            nn.Linear(shape.width, shape.kv_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        sequences, length, _ = q.shape  # of all tokens: those of x are this rank's
        q, k, v = (each.view(sequences, length, -1, self.head_dim) for each in (q, k, v))
        q, k = self.functions.rotary(q, angles), self.functions.rotary(k, angles)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).reshape(sequences, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, functions: Functions) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (RMSNorm(shape.width, functions) for _ in range(2))
        self.attention, self.feed_forward = Attention(shape, functions), FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, shape: Shape, functions: Functions) -> None:
        super().__init__()
        self.shape, self.functions = shape, functions
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, functions) for _ in range(shape.depth))
        self.norm = RMSNorm(shape.width, functions)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, angles: Tensor) -> Tensor:
        """Return the mean loss of these tokens; `angles` [length, head_dim / 2] are of whole sequences."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.functions.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())


PLAN = {
    "tok_embeddings": tp.SequenceParallel(),
    "layers.*.*_norm": tp.SequenceParallel(),
    "layers.*.attention": tp.ColumnParallel("wq", "wk", "wv", dim=1),
    "layers.*.attention.wo": tp.RowParallel(dim=1),
    "layers.*.feed_forward": tp.ColumnParallel("w1", "w3", dim=1),
    "layers.*.feed_forward.w2": tp.RowParallel(dim=1),
    "norm": tp.SequenceParallel(),
    "output": tp.SequenceParallel(),
}


def models(mesh: DeviceMesh, device: torch.device) -> tuple[Transformer, Transformer]:
    """Return the same model twice: plain, and parallel over the mesh with the kernels above."""
    torch.manual_seed(0)  # the same weights on all ranks
    shape = Shape()
    plain = Transformer(shape, PLAIN).to(device, DTYPE)
    for parameter in plain.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    parallel = Transformer(shape, TRITON).to(device, DTYPE)
    parallel.load_state_dict(plain.state_dict())
    tp.parallelize(parallel, mesh["tp"], PLAN)
    if mesh["dp"].size() > 1:
        for layer in parallel.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(parallel, mesh=mesh["dp"])
    return plain, parallel


def angles_of(length: int, device: torch.device) -> Tensor:
    """Return by how much the rotary embedding turns the pairs of a head, [length, head_dim / 2]."""
    half = Shape().width // Shape().heads // 2
    wavelengths = BASE ** (torch.arange(half, device=device) / half)
    return torch.arange(length, device=device)[:, None] / wavelengths


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
    parser = argparse.ArgumentParser(description="A tensor-parallel transformer, tuned while it trains.")
    parser.add_argument("--dp", type=int, default=1, help="ranks of the data-parallel dimension")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 8, help="length of a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="of all ranks together")
    return parser.parse_args()


def tell(
    report: object, options: argparse.Namespace, settled_after: int, losses: list[float], worst: float
) -> None:
    """Print on rank 0 what was found and learnt. Raises SystemExit if losses are not those of plain torch."""
    if dist.get_rank() == 0:
        print(report)
        when = f"settled after step {settled_after}" if settled_after else "still being tuned"
        ranks = f"{options.dp} x {dist.get_world_size() // options.dp} ranks"
        print(f"{options.steps} steps on {ranks}, {when}")
        ends = f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end"
        print(f"{ends}; at most {worst:.1e} from plain torch in the first {CHECKED_STEPS} steps")
    if worst > TOLERANCE or losses[-1] > losses[0]:
        raise SystemExit(f"rank {dist.get_rank()}: losses differ by {worst:.1e}, or nothing was learnt")


def main() -> None:
    options = parse()
    device = set_up()
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (options.dp, world // options.dp), mesh_dim_names=("dp", "tp"))
    plain, parallel = models(mesh, device)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=3e-4 if ON_GPU else 1e-2) for each in (plain, parallel)
    ]
    angles = angles_of(options.tokens, device)

    most = max(options.steps * 4 // 5, 8)  # runs of the search: then the best so far stands

    @contextual_autotune(is_dist=True, mode="online", name="train_transformer example", max_runs=most)
    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizers[1].zero_grad()
        loss = parallel(tokens, labels, angles) / mesh["tp"].size()  # what is minimised is the ranks' sum
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    def plain_step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizers[0].zero_grad()
        loss = plain(tokens, labels, angles)
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    def part(tensor: Tensor, dimension: str, dim: int) -> Tensor:
        return tensor.chunk(mesh[dimension].size(), dim)[mesh[dimension].get_local_rank()]

    settled_after, losses, worst = 0, [], 0.0
    for number in range(1, options.steps + 1):
        starts = torch.randint(0, Shape().vocabulary, (options.sequences, 1), device=device)
        counted = (starts + torch.arange(options.tokens + 1, device=device)) % Shape().vocabulary
        tokens, labels = counted[:, :-1], counted[:, 1:]  # each follows from the one before
        loss = step(*(part(part(each, "dp", 0), "tp", 1) for each in (tokens, labels)))
        if step.settled and not settled_after:
            settled_after = number
        dist.all_reduce(loss)
        losses.append(loss.item() / options.dp)
        if number <= CHECKED_STEPS:
            worst = max(worst, abs(losses[-1] / plain_step(tokens, labels).item() - 1))
    tell(step.report, options, settled_after, losses, worst)
    tp.release(mesh["tp"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
