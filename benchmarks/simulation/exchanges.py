"""GEMM-RS and AG-GEMM in virtual time on 2, 4 or 8 equal ranks: waves of tiles, launches, bytes on the links.

    python -m benchmarks.simulation.exchanges

Each SM takes the next tile of 128 x 256 when it is free; a tile takes its share of cuBLAS's product alone.
Ranks are alike, so one is simulated: what it sends in step s comes to it from another rank at that time.
Rates: copies between four H100 ran at 344 to 360 GB/s, a copy behind a permit takes about 15 us (two H200,
2026-11-26). Nobody has measured stores of a kernel; they have the same rate here, and hold their SM while
they wait for the link.

Beside it stands what four H200 have taken (2026-11-28, commit 21b4dae0): there a launch for each chunk. The
public shapes of a gather are those of four H100 (2026-11-26). Neither hosts nor skew of ranks are simulated.

Last: by how much a gather would be faster whose tiles are taken as chunks arrive, on ranks whose copies are
off by a deviation of so much each. Where they are not, chunks arrive in their order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from benchmarks.common.options import new_parser

SMS, TILE_M, TILE_N = 132, 128, 256
LINK_GBPS = 350.0
COPY_MS, FLAG_MS, LAUNCH_MS = 0.015, 0.002, 0.003  # until a copy runs; until a flag is seen; between kernels
STORERS = 16  # programs of a gather that store rows
OFF, DRAWS = (0.1, 0.3), 20  # deviations of a copy's time; of each, so many gathers


class Shape(NamedTuple):
    """A product of all ranks, and what four H200 have taken; K is that of all ranks in a scatter."""

    m: int
    n: int
    k: int
    gemm_ms: float  # cuBLAS's product of one of four ranks, alone
    ours_ms: float
    fused_ms: float  # torch's fused operation


SCATTERS = (
    Shape(6144, 7168, 20480, 0.566, 0.733, 0.665),
    Shape(8192, 5120, 25600, 0.692, 0.809, 0.763),
    Shape(5120, 8192, 8192, 0.235, 0.384, 0.354),
    Shape(3072, 5376, 21504, 0.235, 0.285, 0.275),
)
GATHERS = (
    Shape(6144, 5376, 5376, 0.456, 0.471, 0.529),
    Shape(12288, 8960, 5120, 1.430, 1.455, 1.490),
    Shape(5120, 2560, 8192, 0.293, 0.330, 0.364),
    Shape(1536, 7168, 8192, 0.238, 0.274, 0.287),
    Shape(256, 3584, 8192, 0.033, 0.085, 0.110),
)
PUBLIC_GATHERS = (
    Shape(8192, 14336, 8192, 2.492, 2.501, 2.604),
    Shape(8192, 3584, 8192, 0.618, 0.632, 0.761),
    Shape(8192, 1792, 4096, 0.173, 0.222, 0.243),
    Shape(8192, 6656, 16384, 2.281, 2.318, 2.526),
    Shape(2048, 3584, 8192, 0.177, 0.195, 0.223),
    Shape(512, 3584, 8192, 0.046, 0.092, 0.129),
)


class Work(NamedTuple):
    """One rank's part: chunks of tiles, and bytes that go to each peer."""

    world: int
    tiles: int  # of a chunk
    tile_ms: float
    chunk_ms: float  # a chunk's bytes on the link


def work_of(shape: Shape, world: int, *, scatters: bool) -> Work:
    rows = shape.m // world
    tiles = math.ceil(rows / TILE_M) * math.ceil(shape.n / TILE_N)
    gemm_ms = shape.gemm_ms * (4 / world if scatters else 1)
    all_tiles = math.ceil(shape.m / TILE_M) * math.ceil(shape.n / TILE_N)
    size = 2 * rows * (shape.n if scatters else shape.k)
    return Work(world, tiles, gemm_ms * SMS / max(all_tiles, SMS), size / LINK_GBPS / 1e6)


class Sms:
    """The SMs; `run` takes the tiles one by one, in their order."""

    def __init__(self, count: int = SMS, begin_ms: float = 0.0) -> None:
        self._free = [begin_ms] * count

    def run(self, tiles: int, tile_ms: float, until: Callable[[float], float]) -> Iterator[float]:
        """Yield when each tile has left its SM: until(when it is computed)."""
        for _ in range(tiles):
            end = until(heapq.heappop(self._free) + tile_ms)
            heapq.heappush(self._free, end)
            yield end

    def end(self) -> float:
        return max(self._free)


class Link:
    """What leaves a rank, one thing after the other."""

    def __init__(self) -> None:
        self._free_ms = 0.0

    def send(self, begin_ms: float, ms: float) -> float:
        self._free_ms = max(self._free_ms, begin_ms) + ms
        return self._free_ms


def each_chunk(work: Work) -> float:
    """Return how long a scatter takes with a launch for each chunk, and a push behind each."""
    end, here, link = 0.0, 0.0, Link()
    for _ in range(work.world - 1):
        end = max(Sms(begin_ms=end).run(work.tiles, work.tile_ms, lambda ms: ms)) + LAUNCH_MS
        here = link.send(end + COPY_MS, work.chunk_ms)
    return max(Sms(begin_ms=end).run(work.tiles, work.tile_ms, lambda ms: max(ms, here)))


def one_launch(work: Work) -> float:
    """Return how long it takes in one launch, whose chunks are pushed once they are complete."""
    sms, link, here = Sms(), Link(), 0.0
    for _ in range(work.world - 1):
        here = link.send(max(sms.run(work.tiles, work.tile_ms, lambda ms: ms)) + COPY_MS, work.chunk_ms)
    return max(sms.run(work.tiles, work.tile_ms, lambda ms: max(ms, here)))


def scatter_by_stores(work: Work) -> float:
    """Return how long it takes in one launch that stores its tiles to the peers."""
    sms, link, here, of_tile = Sms(), Link(), 0.0, work.chunk_ms / work.tiles
    for _ in range(work.world - 1):
        here = max(sms.run(work.tiles, work.tile_ms, lambda ms: link.send(ms, of_tile))) + FLAG_MS
    return max(sms.run(work.tiles, work.tile_ms, lambda ms: max(ms, here)))


def gather_by(work: Work, sms: int, come_ms: Sequence[float]) -> float:
    """Return how long a gather takes on so many SMs: chunks come one by one."""
    running = Sms(sms)
    for here in come_ms:
        all(running.run(work.tiles, work.tile_ms, lambda ms, here=here: max(ms, here + work.tile_ms)))
    return running.end()


def pushed(work: Work) -> float:
    return gather_by(work, SMS, [step * (work.chunk_ms + COPY_MS) for step in range(work.world)])


def gather_by_stores(work: Work) -> float:
    return gather_by(work, SMS - STORERS, [step * (work.chunk_ms + FLAG_MS) for step in range(work.world)])


def gain_by_arrival(work: Work, off: float) -> float:
    """Return the gain of tiles that are taken as chunks arrive; off: the deviation of a copy's time."""
    in_order = by_arrival = 0.0
    for seed in range(DRAWS):
        random, copy_ms = Random(seed), work.chunk_ms + COPY_MS
        # Chunk `step` is the last of so many copies of its rank.
        come_ms = [
            math.fsum(copy_ms * random.lognormvariate(0, off) for _ in range(step))
            for step in range(work.world)
        ]
        in_order += gather_by(work, SMS, come_ms)
        by_arrival += gather_by(work, SMS, sorted(come_ms))
    return in_order / by_arrival - 1


WAYS: dict[str, tuple[tuple[Shape, ...], dict[str, Callable[[Work], float]]]] = {
    "GEMM-RS": (
        SCATTERS,
        {"each chunk": each_chunk, "one launch": one_launch, "by stores": scatter_by_stores},
    ),
    "AG-GEMM": (GATHERS + PUBLIC_GATHERS, {"pushed": pushed, "by stores": gather_by_stores}),
}


def main() -> None:
    new_parser(__doc__).parse_args()
    for name, (shapes, ways) in WAYS.items():
        print(f"{name}, ms: {', '.join(ways)}; waves, one launch a chunk -> one; on four: ours, torch fused")
        if name == "AG-GEMM":
            print(f"behind them: the gain of tiles as they arrive, copies off by {OFF[0]:.0%}, {OFF[1]:.0%}")
        for shape in shapes:
            for world in (2, 4, 8):
                work = work_of(shape, world, scatters=name == "GEMM-RS")
                waves = world * math.ceil(work.tiles / SMS), world * work.tiles / SMS
                sent = (world - 1) * work.chunk_ms * LINK_GBPS
                ended = "  ".join(f"{way(work):.3f}" for way in ways.values())
                if name == "AG-GEMM":
                    ended += "".join(f"  {gain_by_arrival(work, off):+.2%}" for off in OFF)
                taken = f"   {shape.ours_ms:.3f} {shape.fused_ms:.3f}" if world == 4 else ""
                line = f"{shape.m} x {shape.n} x {shape.k}, {world} ranks: {ended}"
                print(f"{line}   {waves[0]} -> {waves[1]:.1f} waves, {sent:.0f} MB{taken}")


if __name__ == "__main__":
    main()
