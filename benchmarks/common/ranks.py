"""The ranks of a benchmark: what torchrun started, on GPUs or on CPU ranks in Triton's interpreter."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, as launch.sh does

import triton

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
COLLECTIVES = "NCCL" if ON_GPU else "gloo"
COLLECTIVE_LIMIT_S = 120


class Unsupported(RuntimeError):
    """An arm that cannot run here; its text is the reason that the table gives."""


class Ranks:
    """The ranks that torchrun started."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
        torch.manual_seed(
            1000 + self.rank
        )  # torch's own start is equal on all ranks, and hides mixed-up shards

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def attempt(self, action: Callable[[], object]) -> str:
        """Do `action` on all ranks; return why it failed, the same on all; empty: it worked everywhere."""
        reason = ""
        try:
            action()
            self.synchronize()
        except Exception as error:  # of any arm; it is told, and the other arms go on
            if not isinstance(error, Unsupported):
                traceback.print_exc()
            reason = f"{'' if isinstance(error, Unsupported) else f'{type(error).__name__}: '}{error}"
        reasons = [text.strip().partition("\n")[0] for text in self.gather(reason)]
        failed = [rank for rank, text in enumerate(reasons) if text]
        if not failed:
            return ""
        where = "" if len(set(reasons)) == 1 else f"rank {failed[0]}: "
        return f"{where}{reasons[failed[0]]}"

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if ON_GPU:
            torch.cuda.synchronize(self.device)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def run_on_ranks(body: Callable[[Ranks], int]) -> None:
    """Join the ranks of torchrun, run `body` and leave the process with the exit code that it returns.

    There is no tear-down of the interpreter. After a failure it could wait for a peer; and after success a
    worker thread of gloo that lets go of its last tensor meanwhile aborts the process (torch 2.13: one run
    in five that ends with a collective).
    """
    code = 1
    try:
        if ON_GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT_S)
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", timeout=limit)
        code = body(Ranks())
        gc.collect()  # NCCL does not end before the graphs that hold calls of it
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torchrun ends the other ranks where it is not 0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this process, with its stack on stderr, if the block takes longer; torchrun ends its peers."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
