"""How often two ranks pick different configs: stock `triton.autotune` on each rank, and here. Needs 2 GPUs.

    ./launch.sh -m benchmarks.tuner.disagreement [--json FILE]

Protocol: one matmul kernel with 18 candidates and 24 keys (M x N x K). Each rank first tunes every key with
stock Triton, by itself, as a data-parallel job does; then the same keys are tuned in one function with
`contextual_autotune(is_dist=True)`. Picks of all ranks are compared key by key; each result is checked
against torch.matmul. Both arms are repeated, to see whether a pick is stable from one tuning to the next.

Trap: stock's picks are compared between ranks of one run, not between runs.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from benchmarks.common.options import new_parser
from dist_autotune import contextual_autotune

SHAPES = [
    (m, n, k)
    for m, (n, k) in itertools.product(
        (512, 1024, 2048, 4096),
        ((1024, 1024), (1536, 2048), (2048, 1024), (3072, 1024), (4096, 512), (896, 3072)),
    )
]


def make_kernel() -> Any:
    """Return a fresh tunable kernel: nothing is known of any key."""
    configs = [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP_M": group}, num_warps=8, num_stages=stages
        )
        for m, n in ((128, 256), (128, 128), (64, 256))
        for group in (4, 8, 16)  # close to each other, as the candidates of a real kernel are
        for stages in (3, 4)
    ]

    @triton.autotune(configs, key=["M", "N", "K"])
    @triton.jit
    def matmul(
        a_ptr, b_ptr, c_ptr, M, N, K,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    ):  # fmt: skip
        pid = tl.program_id(0)
        tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
        first_m = pid // (GROUP_M * tiles_n) * GROUP_M
        rows = min(tiles_m - first_m, GROUP_M)
        offs_m = (first_m + pid % (GROUP_M * tiles_n) % rows) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (pid % (GROUP_M * tiles_n) // rows) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = offs_m[:, None] < M, offs_n[None, :] < N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask_m, other=0.0)
            b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=mask_n, other=0.0)
            acc = tl.dot(a, b, acc)
        tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16), mask=mask_m & mask_n)

    return matmul


def launch(kernel: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
        a, b, c, m, n, k
    )
    return c


def picks(kernel: Any) -> dict[str, str]:
    return {"x".join(map(str, key[:3])): str(config) for key, config in sorted(kernel.cache.items())}


def tune_with_stock(operands: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, str]:
    kernel = make_kernel()
    for a, b in operands:
        launch(kernel, a, b)
    return picks(kernel)


def tune_in_context(operands: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, str]:
    kernel = make_kernel()

    @contextual_autotune(is_dist=True, cache=False, name="disagreement")
    def thunk() -> list[torch.Tensor]:
        return [launch(kernel, a, b) for a, b in operands]

    for (a, b), c in zip(operands, thunk(), strict=True):
        torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-2, atol=0.5)
    return picks(kernel)


def compare(found: dict[str, str]) -> dict[str, list[str]]:
    """Return the picks of all ranks for each key on which they differ."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {
        key: [other[key] for other in everywhere] for key in found if len({o[key] for o in everywhere}) > 1
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="of both arms")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    operands = [
        (
            torch.randn(m, k, device=device, dtype=torch.float16),
            torch.randn(k, n, device=device, dtype=torch.float16),
        )
        for m, n, k in SHAPES
    ]
    rows = []
    for repeat in range(chosen.repeats):
        for name, tune in (
            ("stock triton.autotune", tune_with_stock),
            ("in context, agreed", tune_in_context),
        ):
            found = tune(operands)
            differing = compare(found)
            rows.append(
                {"arm": name, "repeat": repeat, "keys": len(found), "differing": differing, "picks": found}
            )
    if dist.get_rank() == 0:
        for row in rows:
            differing = f"{len(row['differing'])} of {row['keys']} keys differ"
            print(f"{row['arm']:24} repeat {row['repeat']}: {differing}")
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
