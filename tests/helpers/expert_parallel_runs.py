"""What the tests of `ExpertParallel` share."""

import torch
import torch.distributed as dist
from operation_runs import device

from dist_autotune.kernels.ep import ExpertParallel
from dist_autotune.kernels.ep.combine_kernels import combine_rows, grade_rows
from dist_autotune.kernels.ep.dispatch_kernels import gather_rows, send_tokens
from dist_autotune.kernels.ep.product_kernel import CANDIDATES as PRODUCTS
from dist_autotune.kernels.ep.product_kernel import multiply_rows
from dist_autotune.kernels.ep.slots import CANDIDATES

HIDDEN, TOKENS = 32, 16
TUNED = (send_tokens, gather_rows, combine_rows, grade_rows)


def opened(experts: int = 6, topk: int = 2, dtype=torch.float32, **options) -> ExpertParallel:
    options = {"timeout_s": 20.0, "one_launch": None, **options}
    return ExpertParallel(TOKENS, HIDDEN, experts, topk, dtype, **options)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensor.detach().cpu())
    return every


def routing(kind: str, tokens: int, experts: int, topk: int) -> torch.Tensor:
    if kind == "one":
        return torch.full((tokens, topk), experts - 1)
    if kind == "duplicates":
        return torch.randint(0, experts, (tokens, 1)).expand(tokens, topk).clone()
    ids = torch.randint(0, experts, (tokens, topk))
    if kind == "dropped":
        ids[::2, 0], ids[1::3, -1] = -1, experts + 5
    if kind == "skewed":
        ids[: tokens * 3 // 4] = 0
    return ids


def leave_one_candidate(rank: int) -> None:
    """Leave each kernel one candidate, another one on each rank."""
    for kernel in TUNED:
        kernel.configs = [CANDIDATES[rank % len(CANDIDATES)]]
    multiply_rows.configs = [PRODUCTS[rank % len(PRODUCTS)]]


def matrices(experts: int, rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    """Return the same random matrices on every rank."""
    same = torch.Generator().manual_seed(rows)
    return (torch.randn(experts, rows, columns, generator=same) * columns**-0.5).to(dtype)


def own_part(op: ExpertParallel, of_all: torch.Tensor) -> torch.Tensor:
    return of_all.chunk(op.world_size)[op.rank].contiguous().to(device())
