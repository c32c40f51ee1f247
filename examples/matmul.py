"""An ordinary matmul kernel, tuned inside the function that uses it, on one GPU (or in the interpreter).

python examples/matmul.py                       # on a GPU: x [4096, 4096], w1 twice as wide, fp16
TRITON_INTERPRET=1 python examples/matmul.py    # without a GPU
"""

from __future__ import annotations

import argparse

import torch
import triton
import triton.language as tl

from dist_autotune import contextual_autotune

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
BLOCKS = (
    [(128, 256, 64), (128, 128, 64), (256, 128, 64), (64, 256, 64), (64, 64, 64)]
    if ON_GPU
    else [
        (16, 16, 16),
        (32, 32, 32),
        (64, 64, 32),
    ]
)


def candidates() -> list[triton.Config]:
    """Return tiles with the warps and stages that suit them; some of them do not fit every GPU."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
        for m, n, k in BLOCKS
        for warps, stages in ([(4, 3), (8, 3), (8, 4)] if ON_GPU else [(4, 3)])
    ]


@triton.autotune(candidates(), key=["M", "N", "K"])
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """c = a @ b for row-major a [M, K], b [K, N]; one program computes one tile of c."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + offs_m[:, None] * K + offs_k[None, :],
            mask=(offs_m[:, None] < M) & (offs_k[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + offs_k[:, None] * N + offs_n[None, :],
            mask=(offs_k[:, None] < K) & (offs_n[None, :] < N),
            other=0.0,
        )
        acc = tl.dot(a, b, acc)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    matmul_kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
        a, b, c, m, n, k
    )
    return c


@contextual_autotune
def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Two matmuls of different shapes with something between: two contexts, tuned where they run."""
    return matmul(torch.relu(matmul(x, w1)), w2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096 if ON_GPU else 64, help="rows of x and width of w2")
    size = parser.parse_args().size
    if not ON_GPU and not triton.knobs.runtime.interpret:
        parser.error("no GPU is found: set TRITON_INTERPRET=1 to run it in Triton's interpreter")
    options = {"device": "cuda", "dtype": torch.float16} if ON_GPU else {"dtype": torch.float32}
    x, w1 = torch.randn(size, size, **options), torch.randn(size, 2 * size, **options) / size**0.5
    w2 = torch.randn(2 * size, size, **options) / (2 * size) ** 0.5

    y = layer(x, w1, w2)
    expected = torch.relu(x.float() @ w1.float()) @ w2.float()
    error = ((y.float() - expected).norm() / expected.norm()).item()
    print(layer.report)
    print(f"relative error against float32: {error:.1e}")


if __name__ == "__main__":
    main()
