"""Launches and loads kernels as Triton does, with our allocator for the scratch memory of descriptors."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch
import triton

from ..configs import INTERPRETED


def launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Launch `kernel`, a kernel with its grid that makes TMA descriptors on the device; return its result.

    They need scratch memory; the caller's own allocator stays what it is.
    """
    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate_scratch)
    return context.run(kernel, *args, **kwargs)


def load(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Compile and load what a launch with these arguments would run, and run nothing.

    To be called before a side stream is given waits for peers: a driver that loads a kernel may first wait
    for all that is enqueued. What fails here fails at the launch again, which raises.
    """
    if INTERPRETED:
        return
    with contextlib.suppress(Exception):
        compiled = launch(kernel.run, *args, grid=grid, warmup=True, **kwargs)
        compiled._init_handles()
        if compiled.n_spills and not torch.version.hip:
            _make_room_for_locals(4 * compiled.n_spills)


def _make_room_for_locals(bytes_of_thread: int) -> None:
    """Have the driver grow local memory now: at the first launch it would await all streams."""
    from cuda.bindings import driver

    needed = bytes_of_thread + 512
    stack = driver.CUlimit.CU_LIMIT_STACK_SIZE
    status, limit = driver.cuCtxGetLimit(stack)
    if int(status) == 0 and limit < needed:
        driver.cuCtxSetLimit(stack, needed)
        torch.cuda._sleep(1)  # the limit is acted upon at the next launch, of whatever kernel
        torch.cuda.current_stream().synchronize()


def allocate_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Return scratch memory for a launch: an allocator, as Triton takes them."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
