"""The choices of a call of `AllGatherGemm` that ranks make independently of each other.

    consumer     the persistent GEMM that multiplies, and waits inside: "specialized" or "plain"
    pieces       in how many pieces this rank pushes its chunk
    programs     how many programs it has; fewer leave SMs to kernels beside it

None of these needs agreement, and each is a `tunable`, tuned by the time of the whole run. A captured call
takes the choices on which eager calls of its shape have settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dist_autotune import tunable

from ..configs import INTERPRETED
from ..exchange.push import piece_counts

INTERPRETED_PROGRAMS: tuple[int, ...] = (2, 1)  # the interpreter runs them one after the other
SPARED_SMS = (4, 0, 16)  # the first as fast or faster at five of six published shapes, on two H200
CONSUMERS = ("specialized", "plain")

T = TypeVar("T", int, str)


class Choice(NamedTuple):
    """The choices of one call. Made in each call: no dataclass."""

    consumer: str
    pieces: int
    programs: int


@dataclass(frozen=True)
class Fixed:
    """Choices that the caller has fixed for all calls; None: left to each call."""

    consumer: str | None = None
    pieces: int | None = None
    programs: int | None = None

    def check(self) -> None:
        """Raise ValueError unless there is such a choice."""
        if self.consumer not in (None, *CONSUMERS):
            raise ValueError(f"consumer is {self.consumer!r}; it is one of {', '.join(CONSUMERS)}, or None")
        for name, count in (("pieces", self.pieces), ("programs", self.programs)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; it is at least 1, or None")


FREE = Fixed()


@dataclass(frozen=True)
class CallOptions:
    """The options of calls of one shape; untuned calls take the first of each."""

    consumers: tuple[str, ...]
    pieces: tuple[int, ...]
    programs: tuple[int, ...]
    key: tuple[Any, ...]  # of the `tunable`

    def choose(self) -> Choice:
        """Return the choices of this call."""
        consumer = self._tuned("ag_gemm consumer", self.consumers)
        pieces = self._tuned("ag_gemm pieces", self.pieces)
        return Choice(consumer, pieces, self._tuned("ag_gemm programs", self.programs))

    def _tuned(self, name: str, options: tuple[T, ...]) -> T:
        return tunable(name, options, key=self.key) if len(options) > 1 else options[0]


def options_for(
    rows: int, sms: int, *, world_size: int, specialized: bool, key: tuple[Any, ...], fixed: Fixed = FREE
) -> CallOptions:
    """Return the options of calls with so many rows on each rank, on a device with so many SMs (0: none).

    Raises ValueError if the fixed consumer cannot take them.
    """
    consumers = CONSUMERS if specialized else CONSUMERS[1:]
    if fixed.consumer not in (None, *consumers):
        needs = "a Hopper or Blackwell GPU, rows of weight and out that begin at multiples of 16 bytes"
        raise ValueError(
            f"consumer={fixed.consumer!r} cannot take this call, {' and '.join(consumers)} can: it needs "
            f"{needs}, and a shard with as many rows as its smallest tile"
        )
    programs = INTERPRETED_PROGRAMS
    if not INTERPRETED:
        programs = tuple(sms - spared for spared in SPARED_SMS if spared < sms)
    pieces = piece_counts(rows) if world_size > 1 else (1,)
    return CallOptions(
        consumers=(fixed.consumer,) if fixed.consumer else consumers,
        pieces=(fixed.pieces,) if fixed.pieces else pieces,
        programs=(fixed.programs,) if fixed.programs else programs,
        key=key,
    )
