"""A barrier of all ranks, of signals alone: what shows that they order memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dist_autotune.kernels.signals import notify, wait_until
from dist_autotune.kernels.symm import SymmetricTensor


def addresses(tensor: SymmetricTensor) -> torch.Tensor:
    """Return the int64 [world_size] table of the ranks' addresses."""
    pointers = [peer.data_ptr() for peer in tensor.peers]
    table = torch.tensor(pointers, dtype=torch.int64, device=tensor.local.device)
    table.points_to = tensor.peers  # what a launch that is given the table may use, see `checked_memory`
    return table


@triton.jit(do_not_specialize=["rank", "epoch", "patience_ticks"])
def barrier_all(
    signals_ptr,  # int64 [WORLD]: the address of each rank's int32 [WORLD]
    errors_ptr,  # int64 [WORLD]
    rank,
    epoch,
    patience_ticks,
    WORLD: tl.constexpr,
    FENCE: tl.constexpr = False,
):
    """Return when every rank's launch of the same epoch has begun, or patience has ended; one program.

    Place it before work that may fill the device, never behind: a grid that holds every SM and waits for
    a peer would keep this kernel from starting.
    """
    for peer in range(WORLD):
        theirs = tl.load(signals_ptr + peer).to(tl.pointer_type(tl.int32))
        notify(theirs + rank, epoch)
    mine = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in range(WORLD):
        wait_until(mine + peer, epoch, errors_ptr + peer, 1, patience_ticks, FENCE)
