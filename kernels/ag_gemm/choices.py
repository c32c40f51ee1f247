"""The choices of a call of `AllGatherGemm` that ranks make independently of each other.

    consumer     the persistent GEMM that multiplies, and waits inside: "specialized" or "plain", or one of
                 STORING: the plain one, some of whose programs store the chunk to the peers, which nothing
                 pushes then
    pieces       in how many pieces this rank pushes its chunk
    programs     how many programs it has; fewer leave SMs to kernels beside it

None of these needs agreement, and each is a `tunable`, tuned by the time of the whole run. A captured call
takes the choices on which eager calls of its shape have settled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dist_autotune import tunable

from ..configs import INTERPRETED
from ..exchange.push import piece_counts
from ..tensors import check_ways

INTERPRETED_PROGRAMS: tuple[int, ...] = (2, 1)  # the interpreter runs them one after the other
SPARED_SMS = (4, 0, 16)  # the first as fast or faster at five of six published shapes, on two H200
CONSUMERS = ("specialized", "plain")
STORING = {f"{count} storing": count for count in ((1, 2) if INTERPRETED else (16, 8, 32))}


class Choice(NamedTuple):
    """The choices of one call. Made in each call: no dataclass."""

    consumer: str
    pieces: int
    programs: int


class CallOptions(NamedTuple):
    """The options of calls of one shape; untuned calls take the first of each."""

    consumers: tuple[str, ...]
    pieces: tuple[int, ...]
    programs: tuple[int, ...]

    def choose(self, key: tuple[Any, ...]) -> Choice:
        """Return the choices of this call; key: of each `tunable`."""
        named: Any = zip(Choice._fields, self, strict=True)
        return Choice(
            *[tunable(f"ag_gemm {name}", few, key=key) if len(few) > 1 else few[0] for name, few in named]
        )


class Fixed(NamedTuple):
    """Choices that the caller has fixed for all calls; None: left to each call."""

    consumer: str | None = None
    pieces: int | None = None
    programs: int | None = None
    by_stores: bool | None = False  # whether the consumer is one of STORING

    def check(self) -> None:
        """Raise ValueError unless there is such a choice."""
        if self.consumer not in (None, *CONSUMERS):
            raise ValueError(f"consumer is {self.consumer!r}; it is one of {', '.join(CONSUMERS)}, or None")
        for name, count in (("pieces", self.pieces), ("programs", self.programs)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; it is at least 1, or None")

    def check_ways(self, *, collective: bool | None, low_latency: bool | None) -> None:
        """Raise ValueError unless these go together."""
        check_ways(low_latency=low_latency, by_stores=self.by_stores)
        if low_latency and (collective or self.consumer is not None):
            raise ValueError("low_latency=True fixes the way: pass neither consumer nor collective=True")
        if collective and self.consumer is not None:
            raise ValueError(
                f"consumer is {self.consumer!r}, but collective=True leaves the product to cuBLAS"
            )
        if self.by_stores and self.consumer is not None:
            raise ValueError(f"consumer is {self.consumer!r}, but by_stores=True takes one that stores")


FREE = Fixed()


def options_for(
    rows: int, sms: int, world_size: int, *, specialized: bool, fixed: Fixed = FREE
) -> CallOptions:
    """Return the options of calls with so many rows on each rank, on a device with so many SMs (0: none).

    Raises ValueError if the fixed consumer cannot take them.
    """
    consumers: tuple[str, ...] = CONSUMERS if specialized else CONSUMERS[1:]
    if fixed.consumer not in (None, *consumers):
        needs = "a Hopper or Blackwell GPU, rows of weight and out that begin at multiples of 16 bytes"
        raise ValueError(
            f"consumer={fixed.consumer!r} cannot take this call, {' and '.join(consumers)} can: it needs "
            f"{needs}, and a shard with as many rows as its smallest tile"
        )
    if fixed.by_stores is not False and world_size > 1:
        consumers = tuple(STORING) if fixed.by_stores else (*consumers, *STORING)
    programs = INTERPRETED_PROGRAMS
    if not INTERPRETED:
        programs = tuple(sms - spared for spared in SPARED_SMS if spared < sms)
    pieces = piece_counts(rows) if world_size > 1 and not fixed.by_stores else (1,)
    return CallOptions(
        consumers=(fixed.consumer,) if fixed.consumer else consumers,
        pieces=(fixed.pieces,) if fixed.pieces else pieces,
        programs=(fixed.programs,) if fixed.programs else programs,
    )
