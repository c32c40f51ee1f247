"""Run the programs of an interpreted launch side by side, each in a process, where they wait for each other.

Triton's interpreter runs the programs of a grid one after the other, so a kernel whose programs wait for one
another can have only one there. Here the grid is one program for the interpreter, and the launch forks: each
child is another program of it, on memory that all share, and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime import interpreter

from dist_autotune.kernels.exchange.operation import Operation


def share_errors(op: Operation) -> None:
    """Let children write the error records of an operation; to be called when it has been opened."""
    op._errors.share_memory_()
    op._error_records = op._errors.numpy()


@contextlib.contextmanager
def forked_programs(kernel: Any, programs: int, mapped: list[torch.Tensor]) -> Iterator[None]:
    """Run each launch of `kernel`, interpreted, as that many processes; `mapped` is shared memory already."""
    builder = interpreter.interpreter_builder
    execute, set_dim, set_idx = (
        interpreter.GridExecutor.__call__,
        builder.set_grid_dim,
        builder.set_grid_idx,
    )
    shared = {tensor.untyped_storage().data_ptr() for tensor in mapped}
    state: dict[str, Any] = {"forks": False, "children": [], "is_child": False}

    def set_grid_dim(*sizes: int) -> None:
        set_dim(*((programs, 1, 1) if state["forks"] else sizes))

    def set_grid_idx(x: int, y: int, z: int) -> None:
        if state["forks"]:
            assert (x, y, z) == (0, 0, 0), "the grid is to be one program"
            for program in range(1, programs):
                pid = os.fork()
                if pid == 0:
                    state["is_child"], x = True, program
                    break
                state["children"].append(pid)
        set_idx(x, y, z)

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        if executor.fn.__name__ != kernel.fn.__name__:
            execute(executor, *args, **kwargs)
            return
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in shared:
                tensor.share_memory_()
        state.update(forks=True, children=[])
        try:
            execute(executor, *args, **kwargs)
        except BaseException:
            if state["is_child"]:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            raise
        finally:
            if state["is_child"]:
                os._exit(0)
            state["forks"] = False
            ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in state["children"]]
        assert ends == [0] * (programs - 1)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
        mock.patch.object(builder, "set_grid_dim", set_grid_dim),
        mock.patch.object(builder, "set_grid_idx", set_grid_idx),
    ):
        yield
