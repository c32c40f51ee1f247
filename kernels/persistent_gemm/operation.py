"""`persistent_matmul`: a @ b, computed by kernels whose programs stay for many tiles."""

from __future__ import annotations

import functools

import torch
import triton

from ..configs import INTERPRETED
from ..matrices import LINE_BYTES, Matrix, as_matrix, matrix_of_rows
from .candidates import CUT_SCHEDULES, NAMES
from .checks import check_count, check_name, check_operands, check_out, check_out_dtype
from .copies import NOTHING, Copies, plan
from .launch import Shape, counter_of, launch
from .padded import copy, padded_copy, room_for, runs_along_columns
from .plain import plain_gemm
from .splits import sum_splits, workspace_of

SCHEDULERS = ("auto", "contiguous", "strided", "grouped", "chiplet", "dynamic")

CHIPLETS = 8  # of an MI300X or MI350X, each with an L2 cache of its own
INTERPRETED_PROGRAMS = 3  # the interpreter runs them one after the other


def persistent_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    variant: str = "auto",
    scheduler: str = "auto",
    *,
    out_dtype: torch.dtype | None = None,
    programs: int | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Return a @ b for a [M, K] and b [K, N], fp16 or bf16, summed in float32; forward only.

    The result has the type of `out`, or `out_dtype`, or a's: fp16, bf16 or fp32. All strides are allowed.
    `out` shares no memory with a and b, which are read while it is written, in part twice.
    `variant` is one of VARIANTS or PARTS; `auto` takes the fastest, as tuned. The first launch of a shape
    tunes: in context inside `contextual_autotune`, otherwise Triton tunes it alone. `scheduler` is the order
    of the tiles (see `tiles`); `auto` is "grouped", on AMD "chiplet"; stream-K takes "grouped" or "strided".
    `programs` is how many programs stay: by default one on each SM; fewer leave SMs to what runs beside.
    `splits` is into how many parts K is cut (on Hopper and Blackwell) for a second kernel to add up: by
    default one, as stream-K cuts K where tiles are few, without a second kernel.

    The variants run on Hopper and Blackwell, where TMA can address a, b and out: each begins at a multiple
    of 16 bytes and has one contiguous dimension, the other's stride being a multiple of 16 bytes. Elsewhere
    every variant is computed by the body in plain Triton: on other GPUs, with other strides, and on the CPU,
    in Triton's interpreter.

    On Hopper, operands whose rows do not begin at multiples of 128 bytes, and all that TMA cannot address,
    pass through scratch memory where that should take less time (see `copies`). It is torch's, for the time
    of the call, and as large as the matrix would be with rows of whole 128 bytes.
    Raises TypeError or ValueError for arguments that cannot be multiplied.
    """
    check_name("variant", variant, NAMES)
    check_name("scheduler", scheduler, SCHEDULERS)
    if variant == "stream_k" and scheduler not in ("auto", *CUT_SCHEDULES):
        raise ValueError(
            f"stream_k shares out tiles itself; scheduler is {scheduler!r}, not one of {CUT_SCHEDULES}"
        )
    check_operands(a, b)
    if programs is not None:
        check_count("programs", programs)
    check_count("splits", splits)
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)
        check_out_dtype(out.dtype)
    else:
        check_out(out, a, b, out_dtype)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_()
    if a.device.type == "cuda" and not INTERPRETED:
        with torch.cuda.device(a.device):
            _on_gpu(a, b, out, variant, scheduler, programs, splits)
    elif INTERPRETED:
        _run_plain(a, b, out, scheduler, programs or INTERPRETED_PROGRAMS)
    else:
        raise ValueError(
            f"a is on {a.device}; move it to a GPU, or set TRITON_INTERPRET=1 before Triton is imported"
        )
    return out


def _on_gpu(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str,
    scheduler: str,
    programs: int | None,
    splits: int,
) -> None:
    capability, sms = _device(a.device)
    programs = programs or sms
    if capability in (9, 10) and _run_gluon(
        a, b, out, variant, scheduler, programs, splits, tensor_memory=capability == 10
    ):
        return
    _run_plain(a, b, out, scheduler, programs)


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return NVIDIA's major compute capability, 0 for others, and the number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return (0 if torch.version.hip else properties.major), properties.multi_processor_count


def _run_gluon(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str,
    scheduler: str,
    programs: int,
    splits: int = 1,
    *,
    tensor_memory: bool,
) -> bool:
    """Compute with the Gluon body; return False, with nothing done, if the plain body is to run.

    It is where TMA cannot address all tensors, and copies do not pay. On Blackwell nothing is copied.
    """
    c = as_matrix(out)
    if runs_along_columns(out) if c is None else c.transposed:  # out.T = b.T @ a.T
        a, b, out = b.mT, a.mT, out.mT
        c = c and c._replace(transposed=False)  # the same memory, now the rows of `out`
    left, right = as_matrix(a), as_matrix(b)
    if tensor_memory and (c is None or left is None or right is None):
        return False
    (m, k), n = a.shape, b.shape[1]
    workspace, split_rows = out, 0
    if splits > 1:
        workspace, split_rows = workspace_of(out, splits)
        c = matrix_of_rows(workspace)
    shape = Shape(
        m=m,
        n=n,
        k=k,
        trans_a=runs_along_columns(a) if left is None else left.transposed,
        trans_b=runs_along_columns(b) if right is None else right.transposed,
        dtype=a.dtype,
        out_dtype=workspace.dtype,
        schedule="grouped" if scheduler == "auto" else scheduler,
        wanted=variant,
        splits=splits,
        split_rows=split_rows,
        programs=programs,
        a_alignment=0 if left is None else left.alignment(),
        b_alignment=0 if right is None else right.alignment(),
        device=a.device,
        tensor_memory=tensor_memory,
    )
    copies = NOTHING
    if not tensor_memory and (c is None or min(shape.a_alignment, shape.b_alignment) < LINE_BYTES):
        planned = plan(shape, out=c is None)
        if planned is None:
            return False
        copies, shape = planned
    _launch(a, b, workspace, (left, right, c), shape, copies)
    if splits > 1:
        sum_splits(workspace, split_rows, splits, out)
    return True


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    matrices: tuple[Matrix | None, Matrix | None, Matrix | None],
    shape: Shape,
    copies: Copies,
) -> None:
    """Launch on the tensors as TMA reads them, or on copies: all that it cannot address are among those."""
    left, right, c = matrices
    room = out
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


def _run_plain(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scheduler: str, programs: int) -> None:
    rows, columns = out.shape
    if scheduler == "auto":
        scheduler = "chiplet" if torch.version.hip else "grouped"

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (min(programs, triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"])),)

    plain_gemm[grid](
        a,
        b,
        out,
        counter_of(a.device, counts=scheduler == "dynamic"),
        rows,
        columns,
        a.shape[1],
        *a.stride(),
        *b.stride(),
        *out.stride(),
        programs,
        SCHEDULE=scheduler,
        CHIPLETS=CHIPLETS,
        UPCAST=INTERPRETED and a.dtype is torch.bfloat16,
    )
