"""That a settled call waits neither for the device nor for a peer's host, also beside graphs of itself.

On GPUs the device is kept busy before each call, which must return while it still is; rank 1 comes to it when
rank 0 has returned. CPU ranks compute where they call: there no call asks a tensor for a number.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_operation import WITH_COLLECTIVES
from operation_runs import ON_GPUS, TWO, device, on_ranks, run_cases
from tp_runs import workspaces

from dist_autotune.kernels import tp
from dist_autotune.kernels.exchange.operation import Operation

HALF, EXPERTS, TOPK = torch.float16, 3, 2
ROWS, FEATURES, HIDDEN = (16, 64, 32) if ON_GPUS else (8, 16, 16)
BUSY_CYCLES = 200_000_000  # a tenth of a second
ASK = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero")
Calls = dict[str, Callable[[], Any]]


def random(*shape: int, grad: bool = False) -> torch.Tensor:
    return (torch.randn(shape, device=device()) / 8).to(HALF).requires_grad_(grad)


@contextmanager
def operations(collective: bool | None) -> Iterator[Calls]:
    """Open all operations; yield a call of each."""
    rows = [ROWS] * dist.get_world_size()
    calls: Calls = {}
    with ExitStack() as stack:
        opened = {}
        for name, runs in WITH_COLLECTIVES.items():
            of_operation, of_call = runs.sizes(FEATURES, HIDDEN)
            op = runs.open(ROWS, of_operation, collective=collective, timeout_s=60.0)
            opened[name] = stack.enter_context(op)
            operands = runs.operands(op, rows, of_call)
            calls[name] = partial(runs.call, op, operands, runs.new_out(op, rows, operands), rows)
        gather, _, dispatch, combine = opened.values()
        x, up, ups = random(ROWS, FEATURES), random(HIDDEN, FEATURES), random(EXPERTS, HIDDEN, FEATURES)
        downs = random(EXPERTS, HIDDEN, HIDDEN)
        ids = torch.arange(ROWS * TOPK, device=device()).view(ROWS, TOPK) % EXPERTS
        factors = torch.rand(ROWS, TOPK, device=device())

        def routed() -> tuple[torch.Tensor, torch.Tensor]:
            hidden, routing = dispatch.route(x, ups, ids, factors, tokens=rows)
            return dispatch.by_expert(x, ups, routing), combine.by_expert(hidden, downs, routing)

        calls["with what it gathered"] = lambda: gather.with_gathered(x, up)
        yield calls | {"a shared sorting": routed}


@contextmanager
def layers(rank: int) -> Iterator[Calls]:
    """Yield forward and backward of tensor-parallel layers."""
    with workspaces(rank):
        x, up, down = (
            random(*shape, grad=True) for shape in ((ROWS, FEATURES), (HIDDEN, FEATURES), (FEATURES, HIDDEN))
        )

        def pair() -> torch.Tensor:
            return tp.matmul_reduce_scatter(tp.all_gather_matmul(x, up).relu(), down)

        def trained() -> None:
            pair().backward(torch.ones_like(x))

        def inferred() -> None:
            with torch.no_grad():
                pair()

        yield {"trained layers": trained, "layers without gradients": inferred}


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays a graph of the call; a CPU rank makes the call in the lane of captured ones."""
    if device() != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def pretended() -> None:
        with mock.patch.object(Operation, "_is_capturing", return_value=True):
            call()

    return pretended


def at_once(rank: int, call: Callable[[], Any]) -> bool:
    """Return whether the call, on all ranks, came back before the device and before rank 1 came to it."""
    if device() == "cpu":
        with nobody_asks():
            call()
        return True
    torch.cuda.synchronize()
    dist.barrier()
    busy = torch.cuda.Event()
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    torch.cuda._sleep(BUSY_CYCLES)
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    is_back = not busy.query()
    if rank == 0:
        dist.send(torch.empty(1), 1)
    torch.cuda.synchronize()
    return is_back


@contextmanager
def nobody_asks() -> Iterator[None]:
    """Fail if this thread asks a tensor for a number."""
    own = threading.get_ident()

    def refusing(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            assert threading.get_ident() != own, f"a settled call asks a tensor for a number: {name}"
            return ask(*args)

        return asked

    refusals = {name: refusing(name, getattr(torch.Tensor, name)) for name in ASK}
    with mock.patch.multiple(torch.Tensor, **refusals):
        yield


def before_and_after_graphs(rank: int, calls: Calls) -> dict[str, Callable[[], bool]]:
    """Return cases: each call settled, once a graph of it is there, and among its replays."""

    def case(call: Callable[[], Any]) -> bool:
        for _ in range(2):
            call()
        found = [at_once(rank, call)]
        replay = capture(call)
        found.append(at_once(rank, call))
        for _ in range(2 if ON_GPUS else 1):
            replay()
            found.append(at_once(rank, call))
        return all(found)

    return {name: lambda call=call: case(call) for name, call in calls.items()}


@pytest.mark.parametrize("world", TWO)
@pytest.mark.parametrize("collective", [False, True], ids=["overlapped", "by collectives"])
@on_ranks()
def test_a_settled_call_waits_for_nobody_also_beside_graphs(rank, world, collective):
    torch.manual_seed(rank)
    with operations(collective) as calls, layers(rank) as further:
        failed = run_cases(before_and_after_graphs(rank, calls | ({} if collective else further)))
    assert failed == []
