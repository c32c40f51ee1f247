"""Products by cuBLAS, after a gather by a collective."""

from __future__ import annotations

import torch

from ..configs import capability
from ..epilogues import Epilogue
from ..tensors import FP8

FEWEST_COLUMNS_OF_FP8 = 16  # of which cuBLAS takes multiples


def multiply_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, epilogue: Epilogue) -> None:
    """Write left [M, K] @ right [K, N], after its epilogue, to `out` [M, N].

    An epilogue that is more than scales takes scratch memory, a few times [M, N] in float32.
    """
    if not epilogue.key():
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
