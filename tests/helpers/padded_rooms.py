"""Scratch memory of `persistent_matmul` full of NaN: whoever reads what nobody has written is found out."""

from __future__ import annotations

import math

import pytest
import torch

from dist_autotune.kernels.gemm import copies
from dist_autotune.kernels.gemm import launch as launching


def poison_rooms(patched: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have scratch memory full of NaN; return the list of what is made, padding included."""
    made: list[torch.Tensor] = []

    def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pitch = copies.pitch_of(columns, dtype.itemsize)
        made.append(torch.full((rows, pitch), math.nan, dtype=dtype, device=device))
        return made[-1][:, :columns]

    patched.setattr(copies, "room_for", room_for)
    patched.setattr(launching, "room_for", room_for)
    return made
