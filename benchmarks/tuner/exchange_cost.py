"""What an exchange between ranks costs: bytes and ms, as a model with measured coefficients. No GPU needed.

    python -m benchmarks.tuner.exchange_cost --ranks 2 4 8 --simulated 64 256 1024

Protocol: processes on this host, joined by gloo; torch's own collectives take no part. Bytes are counted in
real sessions (several contexts, candidates and bans) on the rank that does not run the hub, and fitted by
least squares. Times are of whole exchanges, back to back, with payloads of those sessions; the figure is the
slowest rank's median over rounds in which the arms take turns. The vote is the difference between settled
calls with watch=True and watch=False. Before and after, a round trip of one byte between two processes over
the loopback device is timed, to calibrate. More ranks than a host has are simulated in one process: what the
hub and the merging ranks compute, without a network, as the processor's time; the best of several.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = (
    "1"  # threads do not survive the fork of a rank
)

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from dist_autotune import contextual_autotune
from dist_autotune.ranks import client
from dist_autotune.ranks.group import GROUPS, ProcessGroup
from dist_autotune.ranks.hub import HubState
from dist_autotune.ranks.wire import pack, unpack
from dist_autotune.search.messages import merge

TIMEOUT_S = 120.0
LIMIT_S = 600  # of one set of ranks
ROUNDS = 20
Cost = dict[str, float]


# ---- ranks


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return what `body(rank, *args)` returns on each of `world_size` processes of one gloo group."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        results: Any = context.Queue()

        def serve(rank: int) -> None:
            os.chdir(directory)
            store = dist.FileStore("store", world_size)
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


# ---- bytes


@dataclass(frozen=True)
class Passed:
    """What one exchange carried on one rank: the payload, the merged one, and bytes on the wire."""

    payload: bytes
    merged_bytes: int
    sent_bytes: int
    received_bytes: int


def counting() -> list[Passed]:
    """Note every exchange that this process makes from now on."""
    noted: list[Passed] = []
    wire = {"sent": 0, "received": 0}
    exchange, pack_message, unpack_messages = ProcessGroup.exchange, client.pack, client.unpack

    def counted(self: ProcessGroup, payload: bytes, *rest: Any) -> bytes:
        wire.update(sent=0, received=0)
        merged = exchange(self, payload, *rest)
        noted.append(Passed(payload, len(merged), wire["sent"], wire["received"]))
        return merged

    def packed(message: dict[str, Any]) -> bytes:
        data = pack_message(message)
        wire["sent"] += len(data)
        return data

    def unpacked(buffer: bytearray) -> Iterator[dict[str, Any]]:
        before = len(buffer)
        messages = list(unpack_messages(buffer))
        wire["received"] += before - len(buffer)
        return iter(messages)

    ProcessGroup.exchange = counted  # type: ignore[method-assign]
    client.pack, client.unpack = packed, unpacked
    return noted


def session(_rank: int, contexts: int, candidates: int, bans: int) -> list[Passed]:
    """Return the exchanges of a session: opening, first run, run with bans, ..."""
    noted = counting()

    def refuse(arguments: dict[str, Any]) -> None:
        if dist.get_rank() == 1 and arguments["n"] <= bans:
            raise OutOfResources(262144, 232448, "shared memory")

    configs = [
        triton.Config({"BLOCK": 8 << n}, num_warps=4, pre_hook=refuse if n == 1 else None)
        for n in range(candidates)
    ]

    @triton.autotune(configs, key=["n"])
    @triton.jit
    def fill(y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, offs, mask=offs < n)

    y = torch.zeros(8 << candidates)

    @contextual_autotune(
        is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False, name="exchange_cost"
    )
    def thunk() -> None:
        for n in range(1, contexts + 1):
            fill[(1,)](y, n)

    thunk()
    thunk()
    return noted


def fit(rows: list[list[float]], values: list[float], digits: int = 1) -> dict[str, Any]:
    """Return least-squares coefficients of a constant and the columns of `rows`, and the largest error."""
    matrix = np.array([[1.0, *row] for row in rows])
    coefficients, *_ = np.linalg.lstsq(matrix, np.array(values, dtype=float), rcond=None)
    errors = np.abs(matrix @ coefficients - values)
    found = [round(float(coefficient), digits) for coefficient in coefficients]
    return {"coefficients": found, "largest_error": round(float(errors.max()), digits)}


def measure_bytes(contexts: list[int]) -> dict[str, Any]:
    """Return what payloads of sessions with so many contexts weigh, as coefficients."""
    shapes = [(c, 4, b) for c in contexts for b in (0, 1, 2, 4) if b <= c]
    shapes += [(c, candidates, 0) for c in contexts[:2] for candidates in (2, 8, 12)]
    noted = {shape: on_ranks(session, 2, *shape)[1] for shape in shapes}
    runs = [shape for shape in shapes if shape[1] == 4]
    firsts = [shape for shape in shapes if not shape[2]]
    per_run = [[float(contexts), float(bans)] for contexts, _, bans in runs]
    per_first = [[float(contexts), float(contexts * candidates)] for contexts, candidates, _ in firsts]

    def of(name: str, number: int, chosen: list[tuple[int, int, int]]) -> list[float]:
        return [sizes(noted[shape][number])[name] for shape in chosen]

    fits = {f"a run, {name}: a, per context, per ban": fit(per_run, of(name, 2, runs)) for name in SIZES}
    fits |= {
        f"a first run, {name}: a, per new context, per candidate": fit(per_first, of(name, 1, firsts))
        for name in SIZES
    }
    smallest = noted[shapes[0]]
    return {"fits": fits, "opening": sizes(smallest[0])}


SIZES = ("payload", "merged", "sent", "received")


def sizes(passed: Passed) -> dict[str, int]:
    counts = (len(passed.payload), passed.merged_bytes, passed.sent_bytes, passed.received_bytes)
    return dict(zip(SIZES, counts, strict=True))


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
        return lambda: agreement.exchange(payload, merge, TIMEOUT_S, "a timing")

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


# ---- simulated ranks


def simulate(size: int, payload: bytes) -> Cost:
    """Return what one exchange of `size` ranks costs: the hub, the merging, messages and bytes."""
    state = HubState(range(size))
    told: dict[int, list[bytes]] = {rank: [] for rank in range(size)}
    hub_s, merge_s, messages, passed_bytes = 0.0, 0.0, 0, 0

    def post(rank: int) -> None:
        nonlocal hub_s, messages, passed_bytes
        data = bytearray(pack({"op": "post", "id": 0, "sequence": 0, "rank": rank, "payload": payload}))
        passed_bytes += len(data)
        messages += 1
        began = time.process_time()
        (message,) = unpack(data)
        state.handle(message, lambda reply: told[rank].append(pack(reply)))
        hub_s += time.process_time() - began

    def merged(payloads: list[bytes]) -> dict[str, bytes]:
        nonlocal merge_s
        began = time.process_time()
        end = {"merged": merge(*payloads)}
        merge_s = time.process_time() - began
        return end

    state.merges[0] = merged
    for rank in reversed(range(size)):
        post(rank)
    received = [data for each in told.values() for data in each]
    return {
        "hub_ms": (hub_s - merge_s) * 1e3,
        "merge_ms": merge_s * 1e3,
        "messages": messages + len(received),
        "bytes": passed_bytes + sum(map(len, received)),
    }


def measure_simulated(sizes: list[int], payloads: dict[int, bytes], repeats: int) -> list[dict[str, float]]:
    rows = []
    for size in sizes:
        for contexts, payload in payloads.items():
            costs = [simulate(size, payload) for _ in range(repeats)]
            best = {name: min(cost[name] for cost in costs) for name in costs[0]}
            per_rank = {
                "hub_us_per_rank": best["hub_ms"] * 1e3 / size,
                "bytes_per_rank": best["bytes"] / size,
            }
            rows.append({"ranks": size, "contexts": contexts, **best, **per_rank})
    return rows


# ---- all of it


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="processes on this host")
    parser.add_argument(
        "--simulated", type=int, nargs="+", default=[64, 256, 1024], help="ranks in one process"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 4, 2, 8, 16], help="of the sessions")
    parser.add_argument("--calls", type=int, default=400, help="exchanges of each kind")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dist_autotune").setLevel(logging.ERROR)  # functions without launches are meant here
    payloads = {contexts: on_ranks(session, 2, contexts, 4, 0)[1][2].payload for contexts in (1, 10)}
    record: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bytes": measure_bytes(chosen.contexts),
        "real": [],
        "simulated": measure_simulated(chosen.simulated, payloads, 5),
    }
    for ranks in chosen.ranks:
        trips = [round_trip_ms(chosen.calls)]
        by_rank = on_ranks(exchange_ms, ranks, payloads, chosen.calls)
        trips.append(round_trip_ms(chosen.calls))
        costs = {name: slowest([costs[name] for costs in by_rank]) for name in by_rank[0]}
        record["real"].append({"ranks": ranks, "round_trip_ms": slowest(trips), "ms": costs})
    record["model"] = model(record["real"], list(payloads))
    print("\n".join(table(record)))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def model(real: list[dict[str, Any]], contexts: list[int]) -> dict[str, Any]:
    """Return ms of an exchange as a + b ranks + c contexts + d ranks contexts, fitted to the medians."""
    shapes = [(row, count) for row in real for count in contexts]
    rows = [[float(row["ranks"]), float(count), float(row["ranks"] * count)] for row, count in shapes]
    return fit(rows, [row["ms"][f"{count} contexts"]["median"] for row, count in shapes], digits=4)


def table(record: dict[str, Any]) -> list[str]:
    """Return the record as the lines of a page."""
    versions = f"torch {record['torch']}, triton {record['triton']}"
    lines = [f"{record['cores']} cores, load {record['load'][0]:.1f}; {versions}"]
    lines += ["", "| bytes of one rank | coefficients | largest error |", "|---|---|---|"]
    for name, fitted in record["bytes"]["fits"].items():
        lines.append(
            f"| {name} | {', '.join(map(str, fitted['coefficients']))} | {fitted['largest_error']} |"
        )
    lines.append(f"| opening | {record['bytes']['opening']} | |")
    names = list(record["real"][0]["ms"])
    lines += ["", f"| ranks | round trip | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in record["real"]:
        cells = [row["round_trip_ms"], *(row["ms"][name] for name in names)]
        texts = [f"{cell['median']:.4f} ({cell['quiet']:.4f})" for cell in cells]
        lines.append(f"| {row['ranks']} | {' | '.join(texts)} |")
    fitted = ", ".join(map(str, record["model"]["coefficients"]))
    lines += ["", f"ms = a + b ranks + c contexts + d ranks contexts: {fitted}"]
    lines[-1] += f", largest error {record['model']['largest_error']}"
    lines += ["", "| simulated | contexts | messages | bytes/rank | hub us/rank | hub ms | merge ms |"]
    lines.append("|---" * 7 + "|")
    for row in record["simulated"]:
        lines.append(
            f"| {row['ranks']} | {row['contexts']} | {row['messages']} | {row['bytes_per_rank']:.0f} "
            f"| {row['hub_us_per_rank']:.1f} | {row['hub_ms']:.1f} | {row['merge_ms']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()
