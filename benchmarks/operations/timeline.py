"""What ran beside what in one call: copies, tiles and waits, from the stamps of a kernel and from events.

    python -m benchmarks.operations.timeline RECORD.json PICTURE.svg    # of `ag_gemm_timeline --json`

Time is in microseconds from the first stamp of the kernel. The stamps are of the GPU's own clock
(%globaltimer), which moves in steps of 32 ns or more; copies and the call as a whole are timed by events. The
two clocks are laid over each other just before the call, where a small kernel reads the one and the event
behind it is the origin of the other: to about 2 us.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser

WAITED_US = 1.0  # from here on a wait is counted: a poll that finds its rows takes about as long
INCHES_WIDE, INCHES_HIGH = 11.0, 4.0  # of one rank's picture


@dataclass(frozen=True)
class Tile:
    """One tile: it may be loaded from `ready_us` on, and its stores have been started at `stored_us`."""

    chunk: int  # in the order of visits: 0 is the rank's own
    came_us: float  # when the load warp came to it
    ready_us: float
    stored_us: float
    sm: int

    @property
    def waited_us(self) -> float:
        return self.ready_us - self.came_us


@dataclass(frozen=True)
class Span:
    """Something with a beginning and an end."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """One call on one rank."""

    rank: int
    tiles: tuple[Tile, ...]
    copies: tuple[Span, ...]
    call_us: float


def read(of_rank: dict[str, Any], world_size: int) -> Timeline:
    """Return the timeline of what a rank recorded. Raises ValueError where no tile left a stamp."""
    stamps = [row for row in of_rank["stamps"] if row[2] >= 0]
    if not stamps:
        raise ValueError(f"rank {of_rank['rank']}: no tile left a stamp; was another consumer's kernel run?")
    start_ns = min(row[0] for row in stamps)
    per_chunk = len(stamps) // world_size
    tiles = tuple(
        Tile(number // per_chunk, *((ns - start_ns) / 1e3 for ns in row[:3]), sm=row[3])
        for number, row in enumerate(stamps)
    )
    start_us = (start_ns - of_rank["origin_ns"]) / 1e3
    copies = tuple(Span(name, begin - start_us, end - start_us) for name, begin, end in of_rank["copies_us"])
    return Timeline(of_rank["rank"], tiles, copies, of_rank["call_us"])


def table(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return what a record shows of the ranks: how long the copies took, which tiles waited and how long."""
    rows = []
    for timeline in timelines:
        waits = [tile.waited_us for tile in timeline.tiles if tile.waited_us >= WAITED_US]
        lost_us: dict[int, float] = defaultdict(float)
        for tile in timeline.tiles:
            lost_us[tile.sm] += tile.waited_us
        begin_us = min((copy.begin_us for copy in timeline.copies), default=0.0)
        end_us = max((copy.end_us for copy in timeline.copies), default=0.0)
        rows.append(
            (
                str(timeline.rank),
                f"{timeline.call_us:.1f}",
                f"{begin_us:.1f}",
                f"{end_us:.1f}",
                str(len(timeline.tiles)),
                str(len(waits)),
                f"{max(waits, default=0.0):.1f}",
                f"{statistics.mean(lost_us.values()):.1f}",
                f"{100 * statistics.mean(lost_us.values()) / timeline.call_us:.1f}",
            )
        )
    columns = (
        *("rank", "call us", "copies from", "to us", "tiles", "waited", "longest us"),
        *("mean of an SM us", "% of the call"),
    )
    return {
        "columns": columns,
        "figures": columns,
        "rows": rows,
        "notes": [
            f"waited: tiles whose load warp waited {WAITED_US:g} us or more for rows of its chunk. Of an SM: "
            "all waits of its load warp, most of which the tensor cores do not see: they have the k blocks "
            "that were loaded before.",
        ],
    }


def draw(title: str, timelines: Sequence[Timeline], path: Path) -> None:
    """Write the picture: above the copies, below a line for each SM; tiles by chunk, waits in red."""
    import matplotlib
    from matplotlib.figure import Figure

    # Thousands of tiles: pixels inside the picture, text and axes as they are.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = Figure(figsize=(INCHES_WIDE, INCHES_HIGH * len(timelines)), layout="constrained", dpi=150)
        panels = figure.subplots(
            2 * len(timelines), 1, sharex=True, squeeze=False, height_ratios=[1, 6] * len(timelines)
        )
        for place, timeline in enumerate(timelines):
            above, below = panels[2 * place][0], panels[2 * place + 1][0]
            _draw_copies(above, timeline)
            _draw_tiles(below, timeline)
            above.set_title(f"rank {timeline.rank}", loc="left", fontsize="small")
        panels[-1][0].set_xlabel("us from the first stamp of the kernel")
        figure.suptitle(title)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_copies(axes: Any, timeline: Timeline) -> None:
    for place, copy in enumerate(timeline.copies):
        span = [(copy.begin_us, copy.end_us - copy.begin_us)]
        axes.broken_barh(span, (0.1, 0.8), color=f"C{place % 10}", alpha=0.8)
    axes.set_yticks([0.5], ["copies"])
    axes.set_ylim(0, 1)


def _draw_tiles(axes: Any, timeline: Timeline) -> None:
    lines = {sm: line for line, sm in enumerate(sorted({tile.sm for tile in timeline.tiles}))}
    by_line: dict[int, list[Tile]] = defaultdict(list)
    for tile in timeline.tiles:
        by_line[lines[tile.sm]].append(tile)
    for line, tiles in by_line.items():
        before_us = 0.0  # a tile's work is drawn behind the one before it: loads run ahead of the stores
        for tile in sorted(tiles, key=lambda tile: tile.stored_us):
            begin_us = max(tile.ready_us, before_us)
            span = [(begin_us, tile.stored_us - begin_us)]
            axes.broken_barh(span, (line, 0.9), color=f"C{tile.chunk % 10}", rasterized=True)
            if tile.waited_us >= WAITED_US and tile.ready_us > before_us:
                waited_us = tile.ready_us - max(tile.came_us, before_us)
                axes.broken_barh([(tile.ready_us - waited_us, waited_us)], (line, 0.9), color="red")
            before_us = tile.stored_us
    axes.set_ylabel("SM")
    axes.set_ylim(len(lines), 0)
    chunks = sorted({tile.chunk for tile in timeline.tiles})
    names = ["own chunk", *(f"chunk of rank + {chunk}" for chunk in chunks[1:])]
    handles = [axes.barh([-9], [0], color=f"C{chunk % 10}") for chunk in chunks]
    handles.append(axes.barh([-9], [0], color="red"))
    axes.legend(handles, [*names, "waiting"], fontsize="x-small", loc="lower right")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("record", type=Path, help="a --json file")
    parser.add_argument("picture", type=Path, help="its type is its ending")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    timelines = [read(of_rank, record["hardware"]["world_size"]) for of_rank in record["timelines"]]
    draw(f"{record['title']}, {record['shape']}", timelines, options.picture)


if __name__ == "__main__":
    main()
