"""What `AllGatherGemm` says when it is called wrongly or let down by a peer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..exchange.operation import PeerTimeout
from ..exchange.words import NOT_COPIED, NOT_FETCHED, NOT_PUSHED, NOT_READY, OTHER_ROWS, OTHER_ROWS_PUSHED
from ..signals import Failure, read_failure
from ..tensors import check_tensor


def failure_error(words: Iterable[int], rank: int, last_call: int) -> Exception | None:
    """Return the exception for what the kernels of `rank` wrote to its error words; None for nothing."""
    failures = {peer: failure for peer, word in enumerate(words) if (failure := read_failure(int(word)))}
    if not failures:
        return None
    texts = [_describe(peer, failure, rank, last_call) for peer, failure in failures.items()]
    text = f"AllGatherGemm, rank {rank}: {'; '.join(texts)}"
    next_step = "Close it on all ranks and open another"
    if any(failure.kind not in (OTHER_ROWS.value, OTHER_ROWS_PUSHED.value) for failure in failures.values()):
        return PeerTimeout(f"{text}. Find out what that rank is doing. {next_step}")
    return ValueError(f"{text}. Every rank must pass as many rows. {next_step}")


def _describe(peer: int, failure: Failure, rank: int, last_call: int) -> str:
    if failure.kind == NOT_PUSHED.value:
        return f"rank {peer}, or one that it waits for, did not push chunk {peer} in time"
    if failure.kind == OTHER_ROWS_PUSHED.value:
        return f"rank {peer} pushed {failure.seen} rows, not as many as this rank passed"
    call = last_call - (last_call - failure.epoch) % 2**28
    if failure.kind == NOT_READY.value:
        return (
            f"rank {peer} did not offer chunk {peer} of call {call} in time (its last: call {failure.seen})"
        )
    if failure.kind == NOT_COPIED.value:
        return f"chunk {peer} of call {call} was offered by rank {peer} and not copied in time"
    if failure.kind == NOT_FETCHED.value:
        return f"rank {peer} did not fetch chunk {rank} of call {call} in time"
    return f"in call {call} rank {peer} passed {failure.seen} rows, not as many as this rank"


def check_tensors(
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    shard: torch.Tensor,
    world_size: int,
) -> None:
    """Raise unless the operation whose symmetric input buffer is `shard` can compute with these tensors."""
    check_tensor("a_shard", a_shard, shard.dtype, shard.device)
    check_tensor("weight", weight, shard.dtype, shard.device)
    capacity, k = shard.shape
    rows = a_shard.shape[0]
    if not 1 <= rows <= capacity:
        raise ValueError(f"a_shard has {rows} rows; this operation takes 1 to m_per_rank={capacity}")
    if a_shard.shape[1] != k or weight.shape[1] != k:
        given = f"a_shard {list(a_shard.shape)} and weight {list(weight.shape)}"
        raise ValueError(f"{given} must both have K={k} columns; the weight is [N, K], not [K, N]")
    if weight.shape[0] == 0:
        raise ValueError("weight has no rows; there is nothing to compute")
    if out is not None:
        check_tensor("out", out, shard.dtype, shard.device)
        wanted = [world_size * rows, weight.shape[0]]
        if list(out.shape) != wanted:
            raise ValueError(f"out has shape {list(out.shape)}; the result has {wanted}")
    offset = a_shard.data_ptr() - shard.data_ptr()
    inside = 0 <= offset < shard.numel() * shard.element_size()
    if inside and (offset > 0 or (a_shard.stride(0) != k and rows > 1)):
        raise ValueError("a_shard overlaps op.shard without being its first rows; pass op.shard[:m]")
