"""`persistent_matmul`: a @ b, computed by kernels whose programs stay for many tiles."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from ..configs import INTERPRETED
from ..gradients import check_no_gradient
from ..places import keep, place_of
from .candidates import CUT_SCHEDULES, NAMES
from .checks import check_count, check_name, check_operands, check_out, check_out_dtype
from .launch import counter_of
from .plain import plain_gemm
from .route import Route, follow, route_of
from .size_classes import class_of_rows

SCHEDULERS = ("auto", "contiguous", "strided", "grouped", "chiplet", "dynamic")

CHIPLETS = 8  # of an MI300X or MI350X, each with an L2 cache of its own
INTERPRETED_PROGRAMS = 3  # the interpreter runs them one after the other

_ROUTES: dict[Hashable, Route] = {}  # of calls whose arguments have been checked


def persistent_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    variant: str = "auto",
    scheduler: str = "auto",
    *,
    out_dtype: torch.dtype | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Return a @ b for a [M, K] and b [K, N], fp16 or bf16, summed in float32; forward only.

    The result has the type of `out`, or `out_dtype`, or a's: fp16, bf16 or fp32. All strides are allowed.
    `out` shares no memory with a and b, which are read while it is written, in part twice.
    `variant` is one of VARIANTS or PARTS; `auto` takes the fastest, as tuned. The first launch of a shape
    tunes: in context inside `contextual_autotune`, otherwise Triton tunes it alone. Numbers of rows M
    share what was tuned in classes, which end at multiples of 16 up to 128, then at 160, 192, 224, 256, 320
    and so on, four to each doubling. `scheduler` is the order of the tiles (see `tiles`); `auto` is
    "grouped", on AMD "chiplet"; stream-K takes "grouped" or "strided".
    `programs` is how many programs stay: by default one on each SM; fewer leave SMs to what runs beside.

    The variants run on Hopper and Blackwell, where TMA can address a, b and out: each begins at a multiple
    of 16 bytes and has one contiguous dimension, the other's stride being a multiple of 16 bytes. Elsewhere
    every variant is computed by the body in plain Triton: on other GPUs, with other strides, and on the CPU,
    in Triton's interpreter.

    On Hopper, operands whose rows do not begin at multiples of 128 bytes, and all that TMA cannot address,
    pass through scratch memory where that should take less time (see `copies`). It is torch's, for the time
    of the call, and as large as the matrix would be with rows of whole 128 bytes.
    Raises TypeError or ValueError for arguments that cannot be multiplied.
    """
    check_no_gradient("persistent_matmul", a=a, b=b, out=out)
    check_name("variant", variant, NAMES)
    check_name("scheduler", scheduler, SCHEDULERS)
    if variant == "stream_k" and scheduler not in ("auto", *CUT_SCHEDULES):
        raise ValueError(
            f"stream_k shares out tiles itself; scheduler is {scheduler!r}, not one of {CUT_SCHEDULES}"
        )
    if programs is not None:
        check_count("programs", programs)
    if out is None:
        check_operands(a, b)
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)
        check_out_dtype(out.dtype)
    places = (place_of(a), place_of(b), place_of(out), variant, scheduler, programs)
    route = _ROUTES.get(places)
    if route is not None and out_dtype in (None, out.dtype):
        with _on(a.device):
            follow(route, a, b, out)
        return out
    check_operands(a, b)
    check_out(out, a, b, out_dtype)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_()
    if _is_on_gpu(a):
        with _on(a.device):
            route = _multiply(a, b, out, variant, scheduler, programs)
        if route is not None:
            keep(_ROUTES, places, route)
    elif INTERPRETED:
        _run_plain(a, b, out, scheduler, programs or INTERPRETED_PROGRAMS)
    else:
        raise ValueError(
            f"a is on {a.device}; move it to a GPU, or set TRITON_INTERPRET=1 before Triton is imported"
        )
    return out


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and not INTERPRETED


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the GPU the current device, which it mostly is."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str,
    scheduler: str,
    programs: int | None,
) -> Route | None:
    """Write a @ b to `out`; return the route that the Gluon body has taken, None after the plain one."""
    capability, sms = _device(a.device)
    programs = programs or sms
    if capability in (9, 10):
        on_blackwell = capability == 10
        route = route_of(a, b, out, variant, scheduler, programs, tensor_memory=on_blackwell)
        if route is not None:
            follow(route, a, b, out)
            return route
    _run_plain(a, b, out, scheduler, programs)
    return None


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return NVIDIA's major compute capability, 0 for others, and the number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return (0 if torch.version.hip else properties.major), properties.multi_processor_count


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
        class_of_rows(rows),
        SCHEDULE=scheduler,
        CHIPLETS=CHIPLETS,
        UPCAST=INTERPRETED and a.dtype is torch.bfloat16,
    )
