"""Products by cuBLAS behind a gather by a collective, and the wait of a call that fails before its kernel.

One small kernel does what the overlapping kernels do last: it waits for every peer's chunk and until ours is
with all peers, and lets the side stream through where a peer does not come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import capability
from ..epilogues import NO_EPILOGUE, Epilogue
from ..exchange.chunks import wait_and_check_rows, wait_for_own
from ..exchange.peers import Peers
from ..launches.prepared import PlainLaunches
from ..tensors import FP8
from .call import GatherCall

FEWEST_COLUMNS_OF_FP8 = 16  # of which cuBLAS takes multiples


@triton.jit(do_not_specialize=["rank", "m", "patience_ticks"])
def await_chunks(flags_ptr, errors_ptr, rank, m, patience_ticks, WORLD: tl.constexpr):
    """Return when all chunks are where they are read, or patience has ended; a program a chunk."""
    chunk = (rank + 1 + tl.program_id(0)) % WORLD
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    if chunk == rank:  # by the last program
        wait_for_own(peers, WORLD)
    else:
        wait_and_check_rows(chunk, m, peers, WORLD)


_AWAIT = PlainLaunches(await_chunks, num_warps=1)


def wait_for_all(call: GatherCall, *, only_load: bool = False) -> None:
    """Enqueue the wait for all peers. Kernels behind it see the peers' chunks, also by TMA.

    only_load: load the kernel that waits, and enqueue nothing.
    """
    if call.world_size == 1:
        return
    flags, errors = call.flags, call.errors
    scalars = (call.rank, call.rows, call.patience_ticks)
    kind = (call.world_size, flags.device, flags.data_ptr() % 16 == 0, errors.data_ptr() % 16 == 0)
    constants = {"WORLD": call.world_size}
    _AWAIT.launch(kind, call.world_size, (flags, errors), scalars, constants, only_load=only_load)


def multiply_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, epilogue: Epilogue) -> None:
    """Write left [M, K] @ right [K, N], behind its epilogue, to `out` [M, N].

    An epilogue that is more than scales takes scratch memory, a few times [M, N] in float32.
    """
    if epilogue.kind() == NO_EPILOGUE:
        torch.mm(left, right, out=out)
    elif left.dtype == FP8 and _can_scale_at_once(out, epilogue):
        scales = _of_rows_and_columns(epilogue, out)
        torch._scaled_mm(left, right, *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)
    else:
        out.copy_(epilogue.of(_sums(left, right)))


def _sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in float32."""
    if left.device.type == "cpu":  # torch has no such products there
        return left.float() @ right.float()
    if left.dtype != FP8:
        return torch.mm(left, right, out_dtype=torch.float32)
    if right.shape[1] % FEWEST_COLUMNS_OF_FP8:
        return torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
    one = torch.ones((), dtype=torch.float32, device=left.device)
    return torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=True)


def _can_scale_at_once(out: torch.Tensor, epilogue: Epilogue) -> bool:
    """Return whether torch's product with scales of rows and columns can write to `out`.

    It takes the pitch of the result for its number of columns; before Hopper that of A, too.
    """
    is_right = capability(out.device) >= 9 and out.is_contiguous()
    ends_so = epilogue.bias is None and epilogue.activation is None
    return is_right and ends_so and out.shape[1] % FEWEST_COLUMNS_OF_FP8 == 0


def _of_rows_and_columns(epilogue: Epilogue, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales as torch takes them, [M, 1] and [1, N]."""
    rows, columns = epilogue.scale_a, epilogue.scale_b
    if columns is None:
        columns = torch.ones(out.shape[1], dtype=torch.float32, device=out.device)
    assert rows is not None
    return rows.reshape(-1, 1).contiguous(), columns.reshape(1, -1)
