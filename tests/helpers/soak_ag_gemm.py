"""Call AllGatherGemm thousands of times, as unkindly as is legal, and check every result.

    ./launch.sh tests/helpers/soak_ag_gemm.py [--calls 10000 | --seconds 150] [--backend torch|nvshmem]
        [--graph-share 0.5] [--seed N]

Shapes, candidates, delays, what each rank chooses in each call (who multiplies, in how many pieces it
copies, how many programs run) and the order of eager calls and graph replays are random; two operations take
turns, one of fp16 that pulls and one of bf16 that pushes. Inputs are new in every call, a function of its
number and the rank, so each rank can make every rank's input again and no communication is needed to know
what is right. Nothing waits for the device but the check of each batch. CPU ranks have no graphs and call the
pushed calls instead.

The last line is `calls=... wrong=... hung=... seconds=...`; the exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
from ag_gemm_runs import error_ratio, operands_of, poison

from dist_autotune.kernels.ag_gemm import AllGatherGemm, PeerTimeout, specialized
from dist_autotune.kernels.ag_gemm.call import GatherLayout
from dist_autotune.kernels.ag_gemm.choices import Choice
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import capability
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.symm import SymmetricMemoryError

ON_GPU = torch.cuda.is_available()
CAPACITY, K = (640, 512) if ON_GPU else (24, 32)
ROWS = (1, 37, 128, 333, 640) if ON_GPU else (1, 7, 16, 24)
COLUMNS = (64, 200, 512, 1000) if ON_GPU else (16, 33)
DTYPES = {torch.float16: "pull", torch.bfloat16: "push"}
BATCH = 50 if ON_GPU else 10  # calls between two checks
PATIENCE_S = 60.0  # of a rank for its peers
LIMIT_S = 4 * PATIENCE_S  # for a batch: then the watchdog tells where this rank stands and ends it


@dataclass(frozen=True)
class Call:
    """A call that was enqueued, and what tells how to check it."""

    number: int
    kind: str
    m: int
    out: torch.Tensor
    weight: torch.Tensor


class Inputs:
    """Makes any rank's input of any call, on the device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device)
        self._seed = seed

    def fill(self, tensor: torch.Tensor, number: int, rank: int) -> torch.Tensor:
        self._generator.manual_seed((self._seed << 40) + (number << 8) + rank)
        return tensor.normal_(generator=self._generator)


class Graph:
    """One captured call and the tensors it reads and writes."""

    def __init__(self, op: AllGatherGemm, m: int, n: int, *, in_place: bool) -> None:
        like = op.shard
        self.op, self.m = op, m
        self.a_shard = like[:m] if in_place else like.new_zeros((m, K))
        self.weight = like.new_zeros((n, K))
        self.out = like.new_zeros((m * op.world_size, n))
        self._graph: torch.cuda.CUDAGraph | None = None
        if ON_GPU:
            choose, chosen = op._choose, op._choose(operands_of(op, self.weight, self.out, m))
            op._choose = lambda *shape: chosen  # in the capture too: nothing may be loaded there
            op(self.a_shard, self.weight, self.out)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                op(self.a_shard, self.weight, self.out)
            op._choose = choose

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.op._call(self.a_shard, self.weight, self.out, pushed=True)


def candidates_of_the_other_family(device: torch.device) -> list[triton.Config]:
    """Return the warp-specialised candidates that fit all shapes of which that family takes any."""
    major = capability(device)
    if major not in (9, 10):
        return []
    shape = {"M": 128, "N": COLUMNS[-1], "K": K}
    configs = specialized.CANDIDATES
    return prune_chunks(configs, shape, WORLD=1, TENSOR_MEMORY=major == 10)


class Soak:
    """The operations of this rank and what was found wrong with them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank = dist.get_rank()
        self._options = options
        self._shared = random.Random(options.seed)  # what all ranks must do alike
        self._own = random.Random(f"{options.seed}, rank {self.rank}")  # what each may do as it likes
        self._ops = [
            AllGatherGemm(
                CAPACITY, K, dtype, backend=options.backend, timeout_s=PATIENCE_S, producer=producer
            )
            for dtype, producer in DTYPES.items()
        ]
        for op in self._ops:
            self._choose_at_random(op)
        self._inputs = Inputs(self._ops[0].device, options.seed)
        self._weights = Inputs(self._ops[0].device, options.seed + 1)
        self.calls, self.wrong = 0, 0
        self._specialized = candidates_of_the_other_family(self._ops[0].device) if ON_GPU else []
        for op in self._ops:
            poison(op)
        self._graphs: list[Graph] = []
        for op in self._ops:
            for m, n, in_place in ((ROWS[-1], COLUMNS[-1], True), (ROWS[1], COLUMNS[0], False)):
                self._take_a_candidate()
                self._graphs.append(Graph(op, m, n, in_place=in_place))

    def run(self) -> None:
        """Make all calls; raise PeerTimeout if a peer was lost."""
        began = time.monotonic()
        while self._is_left(began):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            left = BATCH if self._options.seconds else self._options.calls - self.calls
            batch = [self._call() for _ in range(min(BATCH, left))]
            for op in self._ops:
                op.check()
            for call in batch:
                self._verify(call)
            if self.rank == 0:
                seconds = time.monotonic() - began
                print(f"calls={self.calls} wrong={self.wrong} seconds={seconds:.0f}", flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # until all ranks are here and have closed
        for number, op in enumerate(self._ops, 1):
            began = time.monotonic()
            op.close()
            if self.rank == 0:
                seconds = time.monotonic() - began
                print(f"closed {number} of {len(self._ops)} in {seconds:.1f} s", flush=True)

    def _is_left(self, began: float) -> bool:
        """Return the same on all ranks: whether calls, or seconds by the clock of rank 0, are left."""
        if self._options.seconds is None:
            return self.calls < self._options.calls
        is_left = [time.monotonic() - began < self._options.seconds]
        dist.broadcast_object_list(is_left, device=torch.device("cpu"))
        return is_left[0]

    def _call(self) -> Call:
        """Enqueue one call and wait for nothing."""
        self.calls += 1
        if self._own.random() < 0.1:
            time.sleep(self._own.random() / 100)
        if ON_GPU and self._own.random() < 0.1:
            torch.cuda._sleep(self._own.randrange(2_000_000))
        if self._shared.random() < self._options.graph_share:
            return self._replay(self._shared.choice(self._graphs))
        m, n = self._shared.choice(ROWS), self._shared.choice(COLUMNS)
        return self._call_eagerly(self._ops[self.calls % len(self._ops)], m, n)

    def _replay(self, graph: Graph) -> Call:
        self._inputs.fill(graph.a_shard, self.calls, self.rank)
        self._weights.fill(graph.weight, self.calls, self.rank)
        graph.out.fill_(float("nan"))
        graph.replay()
        return Call(self.calls, "replay", graph.m, graph.out.clone(), graph.weight.clone())

    def _call_eagerly(self, op: AllGatherGemm, m: int, n: int) -> Call:
        like = op.shard
        self._take_a_candidate()
        if self._own.random() < 0.3:
            # Legal where chunks are fetched: by this rank, behind this. Those that are pushed lie elsewhere.
            for peer in range(op.world_size):
                if peer != self.rank:
                    op._gather.local[peer].fill_(float("nan"))
        a_shard = like[:m] if self._own.random() < 0.5 else like.new_empty((m, K))
        self._inputs.fill(a_shard, self.calls, self.rank)
        weight = self._weights.fill(like.new_empty((n, K)), self.calls, self.rank)
        out = like.new_full((m * op.world_size, n), float("nan"))
        return Call(self.calls, "call", m, op(a_shard, weight, out), weight)

    def _take_a_candidate(self) -> None:
        all_gather_gemm.configs = [self._own.choice(CANDIDATES)]
        if self._specialized:
            specialized.tuned.configs = [self._own.choice(self._specialized)]

    def _choose_at_random(self, op: AllGatherGemm) -> None:
        """Let each call take one of the options that it has on this rank, at random."""

        def choose(operands: GatherLayout) -> Choice:
            options = operands.options
            return Choice(*map(self._own.choice, (options.consumers, options.pieces, options.programs)))

        op._choose = choose

    def _verify(self, call: Call) -> None:
        shards = [
            self._inputs.fill(call.weight.new_empty((call.m, K)), call.number, rank)
            for rank in range(dist.get_world_size())
        ]
        error = error_ratio(call.out, torch.cat(shards), call.weight)
        if not error < 1:  # NaN too
            self.wrong += 1
            shape = f"m={call.m} n={call.weight.shape[0]} {call.weight.dtype}"
            print(f"rank {self.rank}: {call.kind} {call.number}, {shape}: error {error:.3g}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000 if ON_GPU else 60)
    parser.add_argument("--seconds", type=float, help="of calls, instead of their number")
    parser.add_argument("--backend", default="auto", help="symmetric memory: auto, torch, nvshmem, shm")
    parser.add_argument("--graph-share", type=float, default=0.5, help="how many of the calls are replays")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPU else "gloo", timeout=datetime.timedelta(seconds=LIMIT_S)
    )
    began, soak = time.monotonic(), Soak(options)
    try:
        soak.run()
    except (PeerTimeout, SymmetricMemoryError):  # the latter when closing does not come to its end
        traceback.print_exc()
        seconds = time.monotonic() - began
        print(f"calls={soak.calls} wrong={soak.wrong} hung=1 seconds={seconds:.1f}", flush=True)
        return 1
    everywhere: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everywhere, soak.wrong)
    if soak.rank == 0:
        seconds = time.monotonic() - began
        print(f"calls={soak.calls} wrong={sum(everywhere)} hung=0 seconds={seconds:.1f}", flush=True)
    return 1 if sum(everywhere) else 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        # No tear-down of the interpreter, which could wait for a peer or for a stream that does not end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
