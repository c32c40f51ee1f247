"""Draws the record of a benchmark (its --json file): a group of bars for each shape, the bound across them.

    python -m benchmarks.common.plot RECORD.json PICTURE.svg

Bars are times over the time of the product alone, so that shapes of different size stand side by side.
Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser

PIECES = 4  # of a chunk, for the bound: finer parts than copy engines are worth starting for
INCHES_PER_CASE, INCHES_HIGH = 1.9, 4.2


def all_gather_gemm_ms(gemm_ms: float, copies_ms: float, ranks: int, pieces: int) -> float:
    """Return the least milliseconds from the start until the product of the last rows is done.

    `gemm_ms`: the product alone, on data that is there; `copies_ms`: the copies alone, chunk after chunk,
    each in `pieces` parts. The own chunk is multiplied first, each part no sooner than it has arrived; the
    product never runs faster than alone, the copies never faster than alone, and neither slows the other.
    Tiles have no size here, so a last wave that is not full is only counted as far as it is in `gemm_ms`.
    """
    if ranks == 1:
        return gemm_ms
    parts = (ranks - 1) * pieces
    work_ms = gemm_ms / (ranks * pieces)
    done_ms = gemm_ms / ranks
    for part in range(1, parts + 1):
        done_ms = max(done_ms, copies_ms * part / parts) + work_ms
    return done_ms


@dataclass(frozen=True)
class Plot:
    """Which arms of an operation are drawn, and against what."""

    arms: tuple[str, ...]
    unit: str  # the arm that is 1
    bound_ms: Callable[[Mapping[str, float], int], float | None] = lambda ms, ranks: None


def _gather_bound_ms(ms: Mapping[str, float], ranks: int) -> float | None:
    if "GEMM" not in ms or "copies" not in ms:
        return None
    return all_gather_gemm_ms(ms["GEMM"], ms["copies"], ranks, PIECES)


PLOTS = {
    "ag_gemm": Plot(
        arms=(
            "ours",
            "ours, copied",
            "ours, graph",
            "ours, push",
            "ours, no overlap",
            "NCCL + GEMM",
            "gloo + GEMM",
            "NCCL + own GEMM",
            "torch fused",
            "QuACK",
        ),
        unit="GEMM",
        bound_ms=_gather_bound_ms,
    ),
    "gemm_rs": Plot(
        arms=(
            "ours",
            "ours, graph",
            "GEMM + NCCL",
            "GEMM + gloo",
            "own GEMM + NCCL",
            "QuACK + NCCL",
            "torch fused",
        ),
        unit="GEMM",
    ),
}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the picture of the record; its type is the ending of `path`. Raises ValueError if it has none."""
    plot = PLOTS.get(record["op"])
    if plot is None:
        raise ValueError(f"there is no picture of {record['op']!r}; there are those of {', '.join(PLOTS)}")
    cases = [(case["case"], _times_ms(case)) for case in record["cases"]]
    cases = [(name, ms) for name, ms in cases if plot.unit in ms]
    arms = [arm for arm in plot.arms if any(arm in ms for _, ms in cases)]
    if not arms:
        raise ValueError(f"nothing to draw: no case has both {plot.unit!r} and one of {', '.join(plot.arms)}")

    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + INCHES_PER_CASE * len(cases), INCHES_HIGH), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        found = [(at, ms[arm] / ms[plot.unit]) for at, (_, ms) in enumerate(cases) if arm in ms]
        offset = (place - (len(arms) - 1) / 2) * width
        axes.bar([at + offset for at, _ in found], [ratio for _, ratio in found], width, label=arm)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    ranks, device = record["hardware"]["world_size"], record["hardware"]["device"]
    label: str | None = "bound"
    for at, (_, ms) in enumerate(cases):
        bound_ms = plot.bound_ms(ms, ranks)
        if bound_ms is not None:
            axes.hlines(
                bound_ms / ms[plot.unit], at - 0.45, at + 0.45, color="black", linewidth=2, label=label
            )
            label = None  # one entry in the legend
    axes.set_xticks(range(len(cases)), [f"{name}\n{ms[plot.unit]:.3g} ms" for name, ms in cases])
    axes.set_ylabel(f"time / {plot.unit} alone")
    axes.set_title(f"{record['title']}, {ranks} x {device}, {record['date'][:10]}")
    axes.legend(fontsize="small", ncols=2)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    # Text stays text, and the same record gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": record["op"]}):
        figure.savefig(path, metadata=metadata)


def _times_ms(case: dict[str, Any]) -> dict[str, float]:
    return {arm["name"]: arm["ms"] for arm in case["arms"] if "unavailable" not in arm}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("record", type=Path, help="a --json file")
    parser.add_argument("picture", type=Path, help="its type is its ending")
    options = parser.parse_args()
    draw(json.loads(options.record.read_text()), options.picture)


if __name__ == "__main__":
    main()
