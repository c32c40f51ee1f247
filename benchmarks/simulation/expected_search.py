"""What search="expected" tries and loses, over recorded tables and a model. No GPU needed.

    python -m benchmarks.simulation.expected_search

Protocol: "held back" searches for each key of a recorded table with all others told. Then keys come in ten
drawn orders, each told what those before have tried. Both read the table's times without noise. Fields: 24
kernels of 192 configs whose fields act nearly apart, three keys each, one session a key, 4 % of noise.
Sessions: all keys are met in one run; 2 % of noise, 3 % spikes of x1.5. Regret: of the pick, over the best.

Trap: the models' constants were chosen with the first three tables; on other kernels regret may be higher.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.options import new_parser
from benchmarks.simulation.kernel_sessions import KernelSession
from benchmarks.simulation.recorded_tables import (
    SUBJECTS,
    Kernel,
    Table,
    of_fields,
    table,
    third_party,
    two_kernels,
)
from dist_autotune.search.expectation.order import TrialOrder, best_start

LOSES = 0.03


@dataclass(frozen=True)
class Found:
    regret: float
    share: float  # of the candidates, that was tried
    times: dict[str, float]  # of those


def search(subject: Table, key: str, told: dict[str, dict[str, float]]) -> Found:
    """Search for a key as a session does that knows `told`."""
    row, candidates, fills = subject.told(key), subject.candidates(key), subject.fills(key)
    start = best_start(key, candidates, told, fills) or candidates[0]
    texts = [start, *(text for text in candidates if text != start)]
    order = TrialOrder(key, texts, told, fills=fills)
    while True:
        if (index := order.next()) is not None:
            order.tell(index, row.get(texts[index], math.inf))
        elif not order.widen():
            break
    times = {text: row[text] for index in order.tried if (text := texts[index]) in row}
    best = min(times, key=times.__getitem__)
    return Found(subject.regret(key, best), len(order.tried) / len(texts), times)


def held_back(subject: Table) -> list[Found]:
    """Search for each key with all others told."""
    told = {key: subject.told(key) for key in subject.keys}
    return [search(subject, key, {k: told[k] for k in told if k != key}) for key in subject.keys]


def one_after_another(subject: Table, keys: Sequence[str], told: dict[str, dict[str, float]]) -> list[Found]:
    """Search for each key with what those before it have told, in full or as far as they were tried."""
    found = []
    for key in keys:
        found.append(search(subject, key, dict(told)))
        told.setdefault(key, found[-1].times)
    return found


def in_drawn_orders(subject: Table, orders: int = 3) -> list[list[Found]]:
    """Search for all keys from nothing, in several orders."""
    drawn = (random.Random(seed).sample(subject.keys, len(subject.keys)) for seed in range(orders))
    return [one_after_another(subject, keys, {}) for keys in drawn]


def shown(found: Sequence[Found]) -> str:
    if not found:
        return ""
    shares, regrets = [each.share for each in found], [each.regret for each in found]
    lose = f"{sum(each > LOSES for each in regrets)} of {len(found)} over {LOSES:.0%}"
    return (
        f"tried {statistics.fmean(shares):5.1%}, at most {max(shares):4.0%}; regret "
        f"{statistics.fmean(regrets):6.2%}, at most {max(regrets):5.1%}; {lose}"
    )


def show_tables() -> None:
    for name in SUBJECTS:
        subject = table(name)
        title = f"{name} {len(subject.keys)} x {len(subject.configs)}"
        orders = in_drawn_orders(subject, 10)
        print(f"{title:24} held back     {shown(held_back(subject))}")
        print(f"{'':24} first         {shown([order[0] for order in orders])}")
        print(f"{'':24} second, third {shown([each for order in orders for each in order[1:3]])}")
        print(f"{'':24} later         {shown([each for order in orders for each in order[3:]])}", flush=True)


def show_fields(seeds: int) -> None:
    by_place: list[list[Found]] = [[], [], []]
    for seed in range(seeds):
        session = KernelSession(of_fields(seed), seed, noise=0.04, spikes=0.0)
        tried, regrets = session.one_after_another(), session.regrets()
        for found, count, regret in zip(by_place, tried, regrets, strict=True):
            found.append(Found(regret, count / 192, {}))
    for place, found in enumerate(by_place, 1):
        print(f"192 configs, key {place}       {shown(found)}", flush=True)


def show_sessions(name: str, make: Callable[[int], list[Kernel]], seeds: int) -> None:
    for seed in range(seeds):
        session = KernelSession(make(seed), seed)
        runs, regrets = len(session.session()), session.regrets()
        candidates = sum(len(each.ms) for each in session.kernels.values())
        print(
            f"{name:24} {runs} runs, {session.compiled} of {candidates} compiled; regret "
            f"{statistics.fmean(regrets):.2%}, at most {max(regrets):.1%}",
            flush=True,
        )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=24, help="kernels of the model")
    parser.add_argument("--parts", nargs="+", default=["tables", "fields", "sessions"], help="what to show")
    chosen: argparse.Namespace = parser.parse_args()
    if "tables" in chosen.parts:
        show_tables()
    if "fields" in chosen.parts:
        show_fields(chosen.seeds)
    if "sessions" in chosen.parts:
        show_sessions("32 keys of two kernels", lambda seed: two_kernels(), 3)
        show_sessions("flash-linear-attention", lambda seed: third_party(1024 << seed), 2)
        for number, kernel in enumerate(two_kernels()[::8]):
            show_sessions(f"one key, {number}", lambda seed, kernel=kernel: [kernel], 2)  # type: ignore[misc]


if __name__ == "__main__":
    main()
