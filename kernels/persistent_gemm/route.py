"""How the Gluon body computes a product: what TMA reads, what goes through scratch memory, what is launched.

A route depends on where the tensors are and how they lie, so it is found once and taken again by later calls
with tensors in the same places. It keeps none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..matrices import LINE_BYTES, Matrix, as_matrix, matrix_of_rows
from .copies import NOTHING, Copies, plan
from .launch import Shape, launch
from .padded import copy, padded_copy, room_for, runs_along_columns


@dataclass(frozen=True, eq=False)
class Route:
    """What to launch for tensors in known places; TMA can address those matrices that are not None."""

    shape: Shape
    exchanged: bool  # out.T = b.T @ a.T is computed, and the matrices are those of b.T, a.T and out.T
    a: Matrix | None
    b: Matrix | None
    out: Matrix | None
    copies: Copies


def route_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str,
    scheduler: str,
    programs: int,
    *,
    tensor_memory: bool,
) -> Route | None:
    """Return the way to out = a @ b; None if the plain body is to compute it.

    It is where TMA cannot address all tensors, and copies do not pay. On Blackwell nothing is copied.
    """
    c = as_matrix(out)
    exchanged = runs_along_columns(out) if c is None else c.transposed
    if exchanged:
        a, b, out = b.mT, a.mT, out.mT
        c = c and c._replace(transposed=False)  # the same memory, now the rows of `out`
    left, right = as_matrix(a), as_matrix(b)
    if tensor_memory and (c is None or left is None or right is None):
        return None
    (m, k), n = a.shape, b.shape[1]
    shape = Shape(
        m=m,
        n=n,
        k=k,
        trans_a=runs_along_columns(a) if left is None else left.transposed,
        trans_b=runs_along_columns(b) if right is None else right.transposed,
        dtype=a.dtype,
        out_dtype=out.dtype,
        schedule="grouped" if scheduler == "auto" else scheduler,
        wanted=variant,
        programs=programs,
        a_alignment=0 if left is None else left.alignment(),
        b_alignment=0 if right is None else right.alignment(),
        device=a.device,
        tensor_memory=tensor_memory,
        exchanged=exchanged,
    )
    copies, copies_out = NOTHING, c is None
    if not tensor_memory and (copies_out or min(shape.a_alignment, shape.b_alignment) < LINE_BYTES):
        planned = plan(shape, out=copies_out)
        if planned is None:
            return None
        copies, shape = planned
    return Route(shape, exchanged, left, right, c, copies)


def follow(route: Route, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write a @ b to `out`, for tensors in the places for which `route_of` has found this."""
    shape, copies = route.shape, route.copies
    if copies == NOTHING:
        assert route.a is not None
        assert route.b is not None
        assert route.out is not None
        launch(route.a, route.b, route.out, shape)
        return
    if route.exchanged:
        a, b, out = b.mT, a.mT, out.mT
    # On copies, too: all that TMA cannot address are among those.
    left, right, c, room = route.a, route.b, route.out, out
    if copies.a:
        left, a = padded_copy(a, transposed=shape.trans_a)
    if copies.b:
        right, b = padded_copy(b, transposed=shape.trans_b)
    if copies.out:
        room = room_for(shape.m, shape.n, out.dtype, out.device)
        c = matrix_of_rows(room)
    assert left is not None
    assert right is not None
    assert c is not None
    launch(left, right, c, shape)
    if copies.out:
        copy(room, out)
