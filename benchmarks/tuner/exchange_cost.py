"""What an exchange between ranks costs in ms, and a settled call. No GPU needed.

    python -m benchmarks.tuner.exchange_cost --ranks 2 4 8

Protocol: processes on this host, joined by gloo; torch's own collectives take no part. Times are of whole
exchanges, back to back: each rank writes its report of 1 or 10 contexts, the deciding rank's search makes the
next plan, each rank applies the order. The figure is the slowest rank's median (and its quietest tenth) over
rounds in which the arms take turns. With --deciding, the deciding rank's part alone, for so many ranks. How
many bytes travel is tested: tests/ranks/test_rank_scale.py.

Traps: with more ranks than cores the system's scheduler is timed too; on a busy machine the quietest tenth
says more than the median.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = (
    "1"  # threads do not survive the fork of a rank
)

import torch
import torch.distributed as dist
import triton
from msgspec.structs import replace

from dist_autotune import contextual_autotune
from dist_autotune.ranks.exchange import ExchangeWait
from dist_autotune.ranks.group import GROUPS
from dist_autotune.search.messages import Announcement, Opening, Part, RunReport
from dist_autotune.search.orders import Orders, read_order
from dist_autotune.search.rules import Rules
from dist_autotune.search.search import SESSION_STATE, Search
from dist_autotune.search.strategies import Flow

TIMEOUT_S = 120.0
LIMIT_S = 600  # of one set of ranks
ROUNDS = 20
CANDIDATES = 8  # of a context
Cost = dict[str, float]


# ---- ranks


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return what `body(rank, *args)` returns on each of `world_size` processes of one gloo group."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        results: Any = context.Queue()

        def serve(rank: int) -> None:
            os.chdir(directory)
            store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            results.put((rank, body(rank, *args)))
            dist.barrier()
            dist.destroy_process_group()

        processes = [context.Process(target=serve, args=(rank,), daemon=True) for rank in range(world_size)]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=LIMIT_S) for _ in processes)
        for process in processes:
            process.join(LIMIT_S)
    return [found[rank] for rank in range(world_size)]


def median_and_quiet(times: list[float]) -> Cost:
    """Return the median and the quietest tenth."""
    return {"median": statistics.median(times), "quiet": statistics.quantiles(times, n=10)[0]}


def slowest(costs: list[Cost]) -> Cost:
    return {name: max(cost[name] for cost in costs) for name in costs[0]}


def timed_ms(call: Callable[[], Any], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


# ---- reports and the search that reads them


def endless(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    for number in itertools.count():
        yield candidates[number % len(candidates)]


class Runs:
    """An endless session: what one rank reports of its runs, and the orders of the deciding rank."""

    def __init__(self, contexts: int) -> None:
        rules = Rules(endless, search="endless", n_warmup=0, n_repeat=1, max_runs=1 << 40)
        self.search, self.orders = Search(rules, orders := Orders(rules)), orders
        self._names = [f"{n:016x}" for n in range(contexts)]
        self._digests = [f"{n:016x}" for n in range(CANDIDATES)]
        about = {"the tuned function": "step", **dict.fromkeys(("settled", "clock", "device", "retune"), "-")}
        opening = Opening({SESSION_STATE: "", "cache": "", **about}).encode()
        self.orders.apply(read_order(self.search.decide(Opening, {0: opening})))
        self.apply(self.search.decide(RunReport, {0: self.report(is_first=True)}))

    def report(self, *, is_first: bool = False) -> bytes:
        order = tuple((each, f"BLOCK: {n}, num_warps: 4") for n, each in enumerate(self._digests))
        new = Announcement(0, "matmul", "8, 'fp16'", order, tuple(self._digests), kernel_id="matmul")
        parts = {}
        for name in self._names:
            context = self.orders.contexts.get(name)
            ran = self._digests[0] if context is None else context.digests[context.planned]
            parts[name] = Part(ran, 1.25, announcement=replace(new, key=name) if is_first else None)
        return RunReport({"the tuned function": "step"}, parts=parts, elapsed_s=1.0).encode()

    def apply(self, order: bytes) -> None:
        self.orders.apply(read_order(order))


def deciding_ms(ranks: int, contexts: int, calls: int) -> Cost:
    """Return what the deciding rank takes from reports of so many ranks, already there, to its order."""
    runs, times = Runs(contexts), []
    for _ in range(calls):
        reports = dict.fromkeys(range(ranks), runs.report())
        began = time.perf_counter()
        order = runs.search.decide(RunReport, reports)
        times.append((time.perf_counter() - began) * 1e3)
        runs.apply(order)
    return median_and_quiet(times)


# ---- milliseconds of real ranks


def exchange_ms(rank: int, calls: int) -> dict[str, Cost]:
    agreement = GROUPS.of(None)
    settled = contextual_autotune(lambda: None, is_dist=True, log_dir=None, name="settled")

    def exchanging(contexts: int) -> Callable[[], Any]:
        runs = Runs(contexts)

        def exchange() -> None:
            report = runs.report()
            decide = functools.partial(runs.search.decide, RunReport)
            runs.apply(agreement.exchange(report, decide, ExchangeWait("a timing", TIMEOUT_S)))

        return exchange

    calls_of = {f"{contexts} contexts": exchanging(contexts) for contexts in (1, 10)}
    calls_of["settled call"] = settled
    times: dict[str, list[float]] = {name: [] for name in calls_of}
    for call in calls_of.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls_of.items():
            times[name] += timed_ms(call, max(1, calls // ROUNDS))
    return {name: median_and_quiet(taken) for name, taken in times.items()}


# ---- all of it


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="processes on this host")
    parser.add_argument("--deciding", type=int, nargs="*", default=[64, 256], help="ranks that are simulated")
    parser.add_argument("--calls", type=int, default=400, help="exchanges of each kind")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dist_autotune").setLevel(logging.ERROR)  # functions without launches are meant here
    record: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "real": [],
        "deciding": [],
    }
    for ranks in chosen.ranks:
        by_rank = on_ranks(exchange_ms, ranks, chosen.calls)
        costs = {name: slowest([costs[name] for costs in by_rank]) for name in by_rank[0]}
        record["real"].append({"ranks": ranks, "ms": costs})
    for ranks in chosen.deciding:
        costs = {f"{each} contexts": deciding_ms(ranks, each, chosen.calls) for each in (1, 10)}
        record["deciding"].append({"ranks": ranks, "ms": costs})
    print("\n".join(table(record)))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> list[str]:
    """Return the record as the lines of a page."""
    versions = f"torch {record['torch']}, triton {record['triton']}"
    lines = [f"{record['cores']} cores, load {record['load'][0]:.1f}; {versions}"]
    names = list(record["real"][0]["ms"])
    lines += ["", f"| ranks | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in record["real"]:
        texts = [f"{cost['median']:.4f} ({cost['quiet']:.4f})" for cost in row["ms"].values()]
        lines.append(f"| {row['ranks']} | {' | '.join(texts)} |")
    lines += [
        "",
        "Reports already there, to the order:",
        "",
        "| ranks | 1 context | 10 contexts |",
        "|---|---|---|",
    ]
    for row in record["deciding"]:
        texts = [f"{cost['median']:.3f} ({cost['quiet']:.3f})" for cost in row["ms"].values()]
        lines.append(f"| {row['ranks']} | {' | '.join(texts)} |")
    return lines


if __name__ == "__main__":
    main()
