"""What GPU tests of several operations do: all shapes, and candidates that have all values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

HALVES = (torch.float16, torch.bfloat16)
ALL_CANDIDATES = False  # pytest's option --all-candidates sets it
BLOCKS = (256, 1024, 4096)  # of a kernel that multiplies by a factor


def make_scale() -> Any:
    """Return a kernel with a config for each of BLOCKS."""

    @triton.autotune([triton.Config({"BLOCK": block}) for block in BLOCKS], key=["n"])
    @triton.jit
    def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * factor, mask=offs < n)

    return scale


def scaled(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """Return twice `x` as a launch of such a kernel makes it."""
    y = torch.full_like(x, float("nan"))
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), 2.0)
    return y


def covering_indices(candidates: Sequence[Any], without: Sequence[str] = ()) -> list[int]:
    """Return where candidates are that have every value of every field but `without` between them.

    With --all-candidates, return all. Greedy: next is who has most of what is still missing.
    """
    if ALL_CANDIDATES:
        return list(range(len(candidates)))
    fields = [
        {(name, repr(value)) for name, value in each.all_kwargs().items() if name not in without}
        for each in candidates
    ]
    missing, chosen = set().union(*fields), set()
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(fields[index] & missing))
        chosen.add(best)
        missing -= fields[best]
    return sorted(chosen)


def covering(candidates: Sequence[Any], without: Sequence[str] = ()) -> list[Any]:
    """Return those candidates."""
    return [candidates[index] for index in covering_indices(candidates, without)]


def shapes_and_candidates(
    rank: int,
    shapes: dict[str, Any],
    run_shape: Callable[[Any, torch.dtype], list[float]],
    candidates: Sequence[Any],
    run_candidate: Callable[[int], list[float]],
) -> dict[str, Callable[[], list[float]]]:
    """Return cases: every shape, in the two types by turns, candidates that cover, another one on each rank.

    With --all-candidates, every shape is in both types.
    """
    cases: dict[str, Callable[[], list[float]]] = {
        f"{name}, {dtype}": lambda shape=shape, dtype=dtype: run_shape(shape, dtype)
        for number, (name, shape) in enumerate(shapes.items())
        for dtype in (HALVES if ALL_CANDIDATES else HALVES[number % 2 :][:1])
    }
    cases |= {
        f"candidate {index}": lambda index=index: run_candidate(index)
        for index in covering_indices(candidates)
    }
    cases["different candidates"] = lambda: run_candidate(rank)
    return cases
