"""The choices that a call is given, and the number of tokens of each rank: checks, and what hosts tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement.ballots import Ballots
from ..agreement.errors import RefusedByPeer
from ..symm import SymmetricMemory, SymmetricMemoryError
from .routing import EXCHANGED, digest_of

MOST_ROWS = 2**29  # places in the tables of tiles are int32
# What a rank names in place of its tokens.
REFUSED = 2**32 - 1  # the call
KNOWS_ALL = 2**32 - 2  # it was told those of all ranks, and goes ahead
TOLD_ALIKE = "Pass tokens= on all ranks or on none"


class TokenCounts:
    """Those of the calls of one operation; opening is collective. See [Note: what the host must know]."""

    def __init__(self, name: str, most: int, memory: SymmetricMemory) -> None:
        self._name, self._rank, self._world_size = name, memory.rank, memory.world_size
        self._most = most  # of a rank
        self._must_name = False  # in this eager call this rank has named nothing yet
        self._are_exchanged = False
        self._hosts, self._no_hosts = None, ""
        if memory.world_size > 1:
            advice = f"{TOLD_ALIKE}, or find out what that rank is doing"
            try:  # it fails on all ranks or on none
                self._hosts = Ballots(name, memory.group, memory.timeout_s, advice)
            except SymmetricMemoryError as error:
                self._no_hosts = str(error)

    def begin_call(self, *, is_eager: bool) -> None:
        """Begin a call. In an eager one each host names one thing, so that a rank that refuses can ask."""
        self._must_name = is_eager and self._hosts is not None

    def learn(self, own: int, given: Sequence[int] | None, *, is_capturing: bool) -> tuple[int, ...]:
        """Return the tokens of all ranks; if they are not given, wait for the hosts of all peers."""
        self._are_exchanged = given is None
        if given is not None:
            counts = self._checked(given, own)
            self.name_all()
            return counts
        if self._world_size == 1:
            return (own,)
        if is_capturing:
            raise RuntimeError(
                f"a captured call of {self._name} needs tokens=, the number of tokens of each rank"
            )
        if self._hosts is None:
            raise RuntimeError(f"pass tokens=, the number of tokens of each rank: {self._no_hosts}")
        named = self._ask(own)
        knowing = [rank for rank, count in named.items() if count == KNOWS_ALL]
        if knowing:
            raise ValueError(
                f"ranks {knowing} were given tokens= or a routing, rank {self._rank} was not. {TOLD_ALIKE}"
            )
        if REFUSED in named.values():
            raise RefusedByPeer
        return tuple(named.values())

    def name_all(self) -> None:
        """Let peers know that this rank waits for none: it was told the tokens of all."""
        if self._must_name:
            self._must_name = False
            assert self._hosts is not None
            self._hosts.cast(KNOWS_ALL)

    def refuse(self) -> None:
        """Name that this rank refuses the call; raise RefusedByPeer if no rank has gone ahead in it.

        It waits for the peers' hosts. If this rank has named something before, that stands.
        """
        if self._must_name and KNOWS_ALL not in self._ask(REFUSED).values():
            raise RefusedByPeer

    def _ask(self, own: int) -> dict[int, int]:
        """Name this; return what each rank names, once all have."""
        self._must_name = False
        assert self._hosts is not None
        return self._hosts.exchange(own)

    def digest(self, told: tuple[int, ...]) -> int:
        """Return what devices compare: a digest of what each host was given; one value if all exchanged."""
        return EXCHANGED.value if self._are_exchanged else digest_of(told)

    def leave(self) -> None:
        if self._hosts is not None:
            self._hosts.leave()

    def _checked(self, given: Sequence[int], own: int) -> tuple[int, ...]:
        """Return the number of tokens of each rank, or raise where the caller cannot be right."""
        counts = tuple(int(count) for count in given)
        if len(counts) != self._world_size:
            raise ValueError(
                f"tokens={list(counts)} has {len(counts)} numbers; there are {self._world_size} ranks"
            )
        if min(counts) < 0 or max(counts) > self._most:
            raise ValueError(f"tokens={list(counts)}; each must be 0 to tokens_per_rank={self._most}")
        if counts[self._rank] != own:
            raise ValueError(f"tokens={list(counts)}, but rank {self._rank}, this one, passes {own} tokens")
        return counts


def check_ids(
    topk_ids: torch.Tensor, device: torch.device, world_size: int, capacity: int, max_topk: int
) -> None:
    """Raise unless an operation for so many tokens of each rank can take these choices."""
    check_choices("topk_ids", topk_ids, device, integers=True)
    own, topk = topk_ids.shape
    if own > capacity:
        raise ValueError(f"{own} tokens; this operation takes up to tokens_per_rank={capacity} of each rank")
    if not 1 <= topk <= max_topk:
        raise ValueError(
            f"topk_ids has {topk} choices a token; this operation takes 1 to max_topk={max_topk}"
        )
    if world_size * capacity * topk >= MOST_ROWS:
        raise ValueError(f"{world_size} x {capacity} tokens with topk={topk} are 2**29 rows or more")


def check_weights(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raise unless each of these choices has a weight."""
    check_choices("topk_weights", topk_weights, topk_ids.device, integers=False)
    if topk_weights.shape != topk_ids.shape:
        given = f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}"
        raise ValueError(f"{given} must be of one shape")


def check_choices(name: str, choices: torch.Tensor, device: torch.device, *, integers: bool) -> None:
    """Raise unless `choices` is a matrix of integers, or of floating-point numbers, on this device."""
    if not isinstance(choices, torch.Tensor):
        raise TypeError(f"{name} is a {type(choices).__name__}; a tensor is needed")
    if choices.device != device:
        raise ValueError(f"{name} is on {choices.device}; this operation was opened on {device}")
    if choices.dim() != 2:
        raise ValueError(f"{name} has shape {list(choices.shape)}; [tokens, topk] is needed")
    if integers and choices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {choices.dtype}; torch.int32 or torch.int64 is needed")
    if not integers and not choices.dtype.is_floating_point:
        raise ValueError(f"{name} is {choices.dtype}; a floating-point type is needed")
