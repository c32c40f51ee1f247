"""What benchmarks of products share: their shape, how far from float32 a result is and may be, their arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.arms import Arm

BLOCK = 1024  # rows or columns of a float32 reference at a time


@dataclass(frozen=True)
class Shape:
    """M, N and K; the benchmark's description says of which ranks."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of what is wanted, both taken in float32."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def relative_error_of_blocks(blocks: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the same of blocks together, found and wanted: the whole in float32 could be too large."""
    squares = [
        torch.stack([(found.float() - wanted).square().sum(), wanted.square().sum()]).double()
        for found, wanted in blocks
    ]
    difference, whole = torch.stack(squares).sum(0)
    return float((difference / whole).sqrt())


def explained_error(dtype: torch.dtype, k: int, roundings: int = 1) -> float:
    """Return the relative error that may be: each rounding costs at most eps of the type.

    Adding K products in float32 costs about sqrt(K) of its eps.
    """
    return roundings * torch.finfo(dtype).eps + k**0.5 * torch.finfo(torch.float32).eps


def product_arm(
    name: str,
    prepare: Callable[[], Callable[[], Tensor]],
    *written: Tensor,
    error: Callable[[Tensor], float],
    limit: float,
    gigaflop: float,
) -> Arm:
    """Return an arm that computes a product, into one of the tensors `written` or into one of its own."""

    def poison() -> None:
        for tensor in written:
            tensor.fill_(math.nan)

    work = {"work": gigaflop, "rate": "TFLOP/s"}
    return Arm(name=name, prepare=prepare, error=error, limit=limit, poison=poison, **work)
