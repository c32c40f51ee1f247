"""What a settled eager call of `AllGatherGemm` costs on the host.

    ./launch.sh -m benchmarks.operations.ag_gemm_host [--json FILE]      # with the CUDA driver, on all ranks
    ./launch.sh --cpu --nproc 1 -m benchmarks.operations.ag_gemm_host    # without: the part that is Python's

On GPUs the device sleeps while a burst of calls is enqueued, so nothing is waited for: the figure is how long
the host takes to return from a call, median of all bursts, slowest rank. Then the same without its launch,
and without launch and exchange: the differences are what those two cost. Without GPUs one process pretends to
be rank 0 of 2: kernels are compiled for Hopper, the functions of the driver return at once, and what is left
is our Python and Triton's. `any` leaves the choices to each call, which is how operations are opened.

Traps: a queue that is full makes the host wait, so a burst is short; a busy machine adds, so the lowest of
the medians of five parts is taken. Calls without an exchange come last: no peer is in the middle of one.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.options import add_record_options, new_parser

if not torch.cuda.is_available() and "triton" not in sys.modules:  # behind its import it is too late
    os.environ["TRITON_INTERPRET"] = "0"  # kernels are compiled here, not interpreted

from benchmarks.common.arms import Plan
from benchmarks.common.pretended_device import DeviceUnderTriton
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks
from benchmarks.common.records import clocks_seen, describe_run, leave_record
from dist_autotune.kernels.ag_gemm import AllGatherGemm, plain, specialized
from dist_autotune.kernels.symm.base import SymmetricMemory, SymmetricTensor
from dist_autotune.kernels.symm.cuda import CudaMemory, _Handles
from dist_autotune.kernels.symm.ranks import SharingRanks

ROWS, COLUMNS, K = (4096, 3584, 8192) if ON_GPU else (512, 256, 256)
CONSUMERS = ("specialized", "plain", "any")
PARTS, BURSTS, CALLS = 5, 4, 20  # a call is about ten commands; queues hold a thousand
SLEEP_MS = 20.0
LAYERS, APART = 2000, 128  # weights, and elements between their beginnings
AIM_US = 60.0


# ---- without a GPU


class _Stream:
    """A side stream whose events cost nothing."""

    handle = 7

    def fork(self) -> None: ...

    def join(self) -> None: ...


class _Operation:
    """The driver's form of an operation on a stream; whoever writes it down sets what he likes."""

    def __init__(self) -> None:
        self.writeValue = self.waitValue = types.SimpleNamespace()


class _PretendedRanks(SharingRanks):
    """Rank 0 of 2, whose peer does as it does."""

    def __init__(self) -> None:
        self.group, self.timeout_s = None, 1.0
        self.rank, self.world_size, self.members = 0, 2, (0, 1)

    def _meet(self, step: str, value: Any) -> list[tuple[str, Any]]:
        return [(step, value)] * 2


class _PretendedMemory(CudaMemory):
    """Memory whose driver does nothing, at once."""

    name = "pretended"

    def __init__(self) -> None:
        SymmetricMemory.__init__(self, _PretendedRanks(), torch.device("cpu"), "there is no GPU")
        self._streams, self._handles = [], _Handles()  # of the driver's own
        names = ("cuMemcpyAsync", "cuStreamBatchMemOp", "cuStreamWriteValue32", "cuStreamWaitValue32")
        self._driver = types.SimpleNamespace(
            **dict.fromkeys(names, lambda *args: (0,)),
            CUdeviceptr=int,
            CUstream=int,
            CUstreamBatchMemOpParams=_Operation,
            CUstreamBatchMemOpType=types.SimpleNamespace(
                CU_STREAM_MEM_OP_WAIT_VALUE_32=1, CU_STREAM_MEM_OP_WRITE_VALUE_32=2
            ),
        )

    def side_stream(self) -> Any:
        return _Stream()

    def _here(self) -> int:
        return 0

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        ranks = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
        return SymmetricTensor(ranks[0], tuple(ranks))

    def _synchronize(self) -> None: ...

    def _release(self) -> None: ...


def _read_hopper(op: Any, dtype: torch.dtype) -> None:
    op._sms, op._has_tma, op._needs_fence, op._upcasts = 132, True, True, False


def pretend() -> None:
    """Make this process see a Hopper GPU on which nothing runs."""
    from dist_autotune.kernels.ag_gemm import matmul
    from dist_autotune.kernels.exchange import operation
    from dist_autotune.kernels.gemm import launch as gemm_launch
    from dist_autotune.kernels.launches import loading
    from dist_autotune.kernels.symm import cuda

    torch.set_num_threads(1)  # or a copy now and then waits for a busy core
    DeviceUnderTriton(lambda *args: None).install()
    operation.Operation._read_device = _read_hopper  # type: ignore[method-assign]
    loading.allocate_scratch = lambda size, *_: torch.empty(size, dtype=torch.int8)  # type: ignore[assignment]
    operation.open_symmetric_memory = lambda *args, **kwargs: _PretendedMemory()  # type: ignore[assignment]
    cuda._handle = lambda stream: stream.handle  # type: ignore[attr-defined]
    gemm_launch.capability = lambda device: 9  # type: ignore[assignment]
    matmul.torch = types.SimpleNamespace(mm=lambda *args, **kwargs: None)  # type: ignore[attr-defined]
    plain.all_gather_gemm.configs = plain.all_gather_gemm.configs[:1]  # untuned, as there is no time to find
    specialized.tuned.configs = specialized.tuned.configs[:1]


# ---- measuring


def call_us(call: Callable[[], object], sleep: Callable[[], None], wait: Callable[[], None]) -> float:
    """Return the microseconds of one call on the host."""
    medians = []
    for _ in range(PARTS):
        times_us = []
        for _ in range(BURSTS):
            wait()
            sleep()
            for _ in range(CALLS):
                began = time.perf_counter()
                call()
                times_us.append((time.perf_counter() - began) * 1e6)
        medians.append(statistics.median(times_us))
    wait()
    return min(medians)


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call on the host, of the slowest rank, and what of them its parts are."""

    consumer: str
    way: str
    call_us: float
    without_launch_us: float
    rest_us: float  # without launch and exchange

    def row(self) -> tuple[str, ...]:
        parts = (self.call_us - self.without_launch_us, self.without_launch_us - self.rest_us, self.rest_us)
        return (self.consumer, self.way, *(f"{us:.1f}" for us in (self.call_us, *parts)))


def costs_of(consumer: str, ranks: Ranks) -> list[Cost]:
    """Return the costs of the ways to call an operation."""
    options = {"dtype": torch.bfloat16, "device": ranks.device}
    weight, a_shard = torch.randn(COLUMNS, K, **options), torch.randn(ROWS, K, **options)
    fixed = {} if consumer == "any" else {"consumer": consumer, "pieces": 1, "programs": 132}
    with AllGatherGemm(ROWS, K, torch.bfloat16, timeout_s=60.0, **fixed) as op:
        op.shard.normal_()
        weights = weights_of_layers(COLUMNS, K, options)
        out = torch.empty(op.world_size * ROWS, COLUMNS, **options)
        ways: dict[str, Callable[[], object]] = {
            "in place, out given": lambda: op(op.shard, weight, out),
            "in place": lambda: op(op.shard, weight),
            "copied, out given": lambda: op(a_shard, weight, out),
            f"{LAYERS} weights in turn": lambda: op(op.shard, next(weights), out),
        }
        columns = [times_of(op, ways, ranks)]
        op._launch = lambda *args: None
        columns.append(times_of(op, ways, ranks))
        op._pusher.start = op._pusher.finish = lambda *args, **ways: None
        columns.append(times_of(op, ways, ranks))
    times = zip(*columns, strict=True)
    return [Cost(consumer, way, *figures) for way, figures in zip(ways, times, strict=True)]


def weights_of_layers(rows: int, columns: int, options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield weights of so many layers in turn, for ever; they lie in one another, at own addresses."""
    room = torch.zeros(rows * columns + LAYERS * APART, **options)
    weights = [
        room[begin : begin + rows * columns].view(rows, columns) for begin in range(0, LAYERS * APART, APART)
    ]
    return itertools.cycle(weights)


def times_of(op: AllGatherGemm, ways: dict[str, Callable[[], object]], ranks: Ranks) -> list[float]:
    """Return the microseconds of each way on the slowest rank."""
    found = []
    for call in ways.values():
        for _ in range(5):
            call()
        op.check()
        sleep = (lambda: torch.cuda._sleep(int(SLEEP_MS * 2_000_000))) if ON_GPU else (lambda: None)
        found.append(max(ranks.gather(call_us(call, sleep, ranks.synchronize))))
    return found


def table(costs: list[Cost]) -> dict[str, Any]:
    notes = [f"The aim for a settled eager call is {AIM_US:g} us." if ON_GPU else _PYTHON_ONLY]
    figures = ("host us", "launch", "exchange", "rest")
    return {
        "columns": ("consumer", "call", *figures),
        "figures": figures,
        "rows": [cost.row() for cost in costs],
        "notes": notes,
    }


_PYTHON_ONLY = (
    "Python alone, no GPU: the driver's functions, events and cuBLAS are not in these figures; copying a "
    "shard and allocating the result are, as torch does them on the CPU."
)


def main() -> None:
    parser = new_parser(__doc__)
    add_record_options(parser)
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        if not ON_GPU:
            pretend()
        plan = Plan(warm_ups=5, iterations=PARTS * BURSTS * CALLS, limit_s=300.0)
        title = "A call of AllGatherGemm on the host"
        record = describe_run(ranks, op="ag_gemm_host", title=title, commit=options.commit, plan=plan)
        if not ON_GPU:
            record["hardware"]["device"] = "CPU, a pretended Hopper"
        consumers = CONSUMERS[1:] if ON_GPU and torch.cuda.get_device_capability()[0] < 9 else CONSUMERS
        costs = [cost for consumer in consumers for cost in costs_of(consumer, ranks)]
        record["table"], record["clocks"] = table(costs), clocks_seen(ranks)
        leave_record(record, options, ranks)
        return 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
