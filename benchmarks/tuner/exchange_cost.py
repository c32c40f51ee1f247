"""What an exchange between ranks costs in ms, and a settled call with and without its vote. No GPU needed.

    python -m benchmarks.tuner.exchange_cost --ranks 2 4 8

Protocol: processes on this host, joined by gloo; torch's own collectives take no part. Times are of whole
exchanges, back to back, with payloads of real sessions of 1 and 10 contexts; the figure is the slowest rank's
median over rounds in which the arms take turns. The vote is the difference between settled calls with
watch=True and watch=False. Before and after, a round trip of one byte between two processes over the loopback
device is timed, to calibrate. How many bytes travel is tested: tests/ranks/test_rank_scale.py.

Traps: with more ranks than cores the system's scheduler is timed too; on a busy machine the quietest tenth
says more than the median, and the calibration says how busy it was.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
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
import triton.language as tl
from msgspec import msgpack

from dist_autotune import contextual_autotune
from dist_autotune.ranks.group import GROUPS, ProcessGroup
from dist_autotune.search.messages import RunReport
from dist_autotune.search.reports import agreed_run, read_reports

TIMEOUT_S = 120.0
LIMIT_S = 600  # of one set of ranks
ROUNDS = 20
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


# ---- payloads


def payloads_of_a_session(_rank: int, contexts: int) -> list[bytes]:
    """Return what this rank sends in the exchanges of a session: opening, first run, second run, ..."""
    sent: list[bytes] = []
    exchange = ProcessGroup.exchange

    def noted(self: ProcessGroup, payload: bytes, *rest: Any) -> bytes:
        sent.append(payload)
        return exchange(self, payload, *rest)

    ProcessGroup.exchange = noted  # type: ignore[method-assign]

    @triton.autotune([triton.Config({"BLOCK": 8 << n}, num_warps=4) for n in range(4)], key=["n"])
    @triton.jit
    def fill(y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, offs, mask=offs < n)

    y = torch.zeros(64)

    @contextual_autotune(
        is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False, name="exchange_cost"
    )
    def thunk() -> None:
        for n in range(1, contexts + 1):
            fill[(1,)](y, n)

    thunk()
    return sent


# ---- milliseconds of real ranks


def exchange_ms(rank: int, payloads: dict[int, bytes], calls: int) -> dict[str, Cost]:
    agreement = GROUPS.of(None)
    votes = {
        watch: contextual_autotune(
            lambda: None, is_dist=True, watch=watch, log_dir=None, name=f"watch={watch}"
        )
        for watch in (True, False)
    }

    def exchanging(payload: bytes) -> Callable[[], Any]:
        def decide(reports: dict[int, bytes]) -> bytes:
            return msgpack.encode(agreed_run(read_reports(reports, RunReport), {}, {}))

        return lambda: agreement.exchange(payload, decide, TIMEOUT_S, "a timing")

    calls_of = {f"{contexts} contexts": exchanging(payload) for contexts, payload in payloads.items()}
    calls_of |= {"settled call with vote": votes[True], "settled call without": votes[False]}
    times: dict[str, list[float]] = {name: [] for name in calls_of}
    for call in calls_of.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls_of.items():
            times[name] += timed_ms(call, max(1, calls // ROUNDS))
    return {name: median_and_quiet(taken) for name, taken in times.items()}


def round_trip_ms(calls: int) -> Cost:
    """Return the time of one byte there and back between two processes over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            with socket.create_connection(server.getsockname()) as there:
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while byte := there.recv(1):
                    there.sendall(byte)

        process = multiprocessing.get_context("fork").Process(target=echo, daemon=True)
        process.start()
        here, _ = server.accept()
        with here:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = timed_ms(lambda: (here.sendall(b"x"), here.recv(1)), calls)
        process.join(LIMIT_S)
    return median_and_quiet(times)


# ---- all of it


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="processes on this host")
    parser.add_argument("--calls", type=int, default=400, help="exchanges of each kind")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dist_autotune").setLevel(logging.ERROR)  # functions without launches are meant here
    payloads = {contexts: on_ranks(payloads_of_a_session, 2, contexts)[1][2] for contexts in (1, 10)}
    record: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "real": [],
    }
    for ranks in chosen.ranks:
        trips = [round_trip_ms(chosen.calls)]
        by_rank = on_ranks(exchange_ms, ranks, payloads, chosen.calls)
        trips.append(round_trip_ms(chosen.calls))
        costs = {name: slowest([costs[name] for costs in by_rank]) for name in by_rank[0]}
        record["real"].append({"ranks": ranks, "round_trip_ms": slowest(trips), "ms": costs})
    print("\n".join(table(record)))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> list[str]:
    """Return the record as the lines of a page."""
    versions = f"torch {record['torch']}, triton {record['triton']}"
    lines = [f"{record['cores']} cores, load {record['load'][0]:.1f}; {versions}"]
    names = list(record["real"][0]["ms"])
    lines += ["", f"| ranks | round trip | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in record["real"]:
        cells = [row["round_trip_ms"], *(row["ms"][name] for name in names)]
        texts = [f"{cell['median']:.4f} ({cell['quiet']:.4f})" for cell in cells]
        lines.append(f"| {row['ranks']} | {' | '.join(texts)} |")
    return lines


if __name__ == "__main__":
    main()
