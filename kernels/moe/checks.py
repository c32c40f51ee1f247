"""What operations over experts ask of their arguments, and what they say when that is not so."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_ROWS = 2**29  # places in the tables of tiles are int32


def check_experts(weight: torch.Tensor, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `weight` is [E, N, columns], each row contiguous, of this type and place."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}; a tensor is needed")
    if weight.device != device or weight.dtype != dtype:
        given, wanted = f"{weight.dtype} on {weight.device}", f"{dtype} on {device}"
        raise ValueError(f"weight is {given}; this operation was opened for {wanted}")
    if weight.dim() != 3 or 0 in weight.shape:
        raise ValueError(f"weight has shape {list(weight.shape)}; [E, N, K] is needed, each at least 1")
    if weight.shape[2] != columns:
        raise ValueError(f"weight has shape {list(weight.shape)}; its rows must have K={columns} elements")
    if weight.stride(2) != 1 and columns > 1:
        raise ValueError(f"the rows of weight are not contiguous (strides {weight.stride()})")


def check_choices(name: str, choices: torch.Tensor, device: torch.device, *, integers: bool) -> None:
    """Raise unless `choices` is a matrix of integers, or of floating-point numbers, on this device."""
    if not isinstance(choices, torch.Tensor):
        raise TypeError(f"{name} is a {type(choices).__name__}; a tensor is needed")
    if choices.device != device:
        raise ValueError(f"{name} is on {choices.device}; this operation was opened on {device}")
    if choices.dim() != 2:
        raise ValueError(f"{name} has shape {list(choices.shape)}; [tokens, topk] is needed")
    if integers and choices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {choices.dtype}; torch.int32 or torch.int64 is needed")
    if not integers and not choices.dtype.is_floating_point:
        raise ValueError(f"{name} is {choices.dtype}; a floating-point type is needed")


def check_tokens(tokens: Sequence[int], own: int, rank: int, world_size: int, most: int) -> tuple[int, ...]:
    """Return the number of tokens of each rank, or raise where the caller cannot be right."""
    counts = tuple(int(count) for count in tokens)
    if len(counts) != world_size:
        raise ValueError(f"tokens={list(counts)} has {len(counts)} numbers; there are {world_size} ranks")
    if min(counts) < 0 or max(counts) > most:
        raise ValueError(f"tokens={list(counts)}; each must be 0 to tokens_per_rank={most}")
    if counts[rank] != own:
        raise ValueError(f"tokens={list(counts)}, but rank {rank}, this one, passes {own} tokens")
    return counts
