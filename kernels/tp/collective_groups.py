"""Communicators of one process group that differ in how many SMs their collectives take.

A collective competes for SMs with the kernels beside it. Fewer CTAs leave them more SMs and take longer;
which limit makes the step fastest depends on these kernels, so it is tuned with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from dist_autotune import tunable

from ..symm.ranks import SharingRanks
from .registry import name_of

Limit: TypeAlias = int | None  # CTAs of a collective at most; None: as the group itself has it
Make: TypeAlias = Callable[[dist.ProcessGroup, int], dist.ProcessGroup]

LIMITS: tuple[Limit, ...] = (None, 4, 8, 16)


class CollectiveGroups:
    """A process group, and NCCL communicators of its ranks with at most `max_ctas` CTAs a collective.

        limits = CollectiveGroups(mesh["dp"])
        work = dist.all_reduce(bucket, group=limits.group((bucket.numel(),)), async_op=True)

    Opening and closing are collective, and so is the first call that takes a limit: it makes the
    communicator, which holds GPU memory of its own. Without NCCL, as on the CPU, limits mean nothing and all
    calls get the group.

    Args:
        group: a process group or a mesh of one dimension; None: the default group.
        max_ctas: what calls choose from, equal on all ranks; the first one untuned. None: the group itself.
        name: of the choice in reports; another one for collectives that are tuned apart.
        make: makes the communicator of a limit, in a collective call; None: NCCL's, where the group has NCCL.
        timeout_s: the longest wait for the peers in opening, and in making a communicator.

    Raises:
        ValueError: on all ranks, if max_ctas or name differ on them; here, if a limit is none.
        RuntimeError: if the peers do not answer in time, if a communicator cannot be made on some rank, and
            where this torch's NCCL has no limits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        max_ctas: Sequence[Limit] = LIMITS,
        name: str = "max CTAs of collectives",
        make: Make | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        _check(max_ctas)
        self.whole: dist.ProcessGroup = _resolve_process_group(name_of(group))  # type: ignore[arg-type]
        self.name, self._ranks = name, SharingRanks(self.whole, timeout_s=timeout_s)
        self._make = make or (limited_communicator if _has_nccl(self.whole) else None)
        self.max_ctas: tuple[Limit, ...] = tuple(max_ctas) if self._make else (None,)
        self._made: dict[int, dist.ProcessGroup] = {}
        self._taken: dict[tuple[Any, ...], Limit] = {}  # the last choice of each key
        self._is_closed = False
        self._check_equal("the arguments of CollectiveGroups", [name, *self.max_ctas])

    def limit(self, key: tuple[Any, ...] = ()) -> Limit:
        """Return the limit that this call takes: the same on all ranks, which call it with equal keys.

        It is tuned in a function with is_dist=True that has all ranks of the group, by the time of the whole
        run. Elsewhere it is what they have settled together, or the first.
        """
        limit = self.max_ctas[0]
        if len(self.max_ctas) > 1:
            among, size = self.whole, self._ranks.world_size
            limit = tunable(self.name, self.max_ctas, key=(size, *key), among=among)
        self._taken[key] = limit
        return limit

    def group(self, key: tuple[Any, ...] = ()) -> dist.ProcessGroup:
        """Return the process group for this call's collective; its communicator is made if it is new.

        Wait for the work of a collective before a call of another limit, as with any two communicators.
        Under a capture the communicator must be there: call once before, with what is settled.
        """
        return self.communicator(self.limit(key))

    def communicator(self, limit: Limit) -> dist.ProcessGroup:
        """Return the process group of one of the limits, on all ranks; None: the group itself."""
        if self._is_closed:
            raise ValueError(f"{self.name}: the limits of ranks {list(self._ranks.members)} are closed")
        if limit is None:
            return self.whole
        if limit not in self.max_ctas:
            raise ValueError(f"{self.name}: {limit!r} is none of the limits {self.max_ctas}")
        if limit not in self._made:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.name}: the communicator of {limit} CTAs is not made yet, and a capture cannot "
                    "make it. Make the call that is captured once before."
                )
            self._made[limit] = self._make_communicator(limit)
        return self._made[limit]

    def release_unused(self) -> None:
        """Close the communicators that no key's last choice is, on all ranks: what the search left."""
        self._close({*self._made} - {*self._taken.values()})

    def close(self) -> None:
        """Close all communicators, on all ranks; not the group itself. No captured graph may need them."""
        if not self._is_closed:
            self._is_closed = True
            self._close({*self._made})

    def __enter__(self) -> CollectiveGroups:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make_communicator(self, limit: int) -> dist.ProcessGroup:
        assert self._make is not None
        places = self._check_equal(f"the limit {limit}", [limit], NAMES.next_place)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the group may not be in use while it is split
        made: list[dist.ProcessGroup] = []
        try:
            # Together: a rank that has it could close it while a peer is still connecting.
            with self._ranks.together(f"{self.name}: making the limit {limit}"), NAMES.at(max(places)):
                made.append(self._make(self.whole, limit))
        except RuntimeError:
            for group in made:  # here, not on all ranks
                dist.destroy_process_group(group)
            raise
        return made[0]

    def _check_equal(self, what: str, values: list[Any], own: int = 0) -> list[int]:
        """Raise ValueError on all ranks if one comes with other values; return each one's own. Collective."""
        try:
            everywhere = self._ranks.exchange([what, *values, own])
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {what}: {error}") from error
        if any(each[:-1] != everywhere[0][:-1] for each in everywhere):
            ranks = zip(self._ranks.members, everywhere, strict=True)
            texts = "; ".join(f"rank {rank}: {', '.join(map(str, each[:-1]))}" for rank, each in ranks)
            raise ValueError(f"{self.name}: ranks differ, and would wait for each other for ever: {texts}")
        return [each[-1] for each in everywhere]

    def _close(self, limits: set[int]) -> None:
        if limits and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for limit in sorted(limits):
            with contextlib.suppress(ValueError):  # destroyed already, with all groups
                dist.destroy_process_group(self._made.pop(limit))


class GroupNames:
    """Names for new groups, of this process, that are equal on their ranks and never come twice.

    Torch makes a name of the ranks and the number of process groups that there are. Ranks may have other
    numbers of them; and a name that comes again finds the keys which the group before left in the store.
    """

    def __init__(self) -> None:
        self._last = -1

    @property
    def next_place(self) -> int:
        """Return the lowest number of groups with which a name is new here."""
        return max(_number_of_groups(), self._last + 1)

    @contextlib.contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Let the block make a group as if there were that many others."""
        fillers = []
        try:
            while _number_of_groups() < place:
                own = [dist.get_rank()]
                fillers.append(dist.new_group(own, backend="gloo", use_local_synchronization=True))
            self._last = place
            yield
        finally:
            for filler in fillers:
                dist.destroy_process_group(filler)


NAMES = GroupNames()


def _number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def limited_communicator(group: dist.ProcessGroup, max_ctas: int) -> dist.ProcessGroup:
    """Return an NCCL communicator of the group's ranks whose collectives have at most `max_ctas` CTAs."""
    parent: Any = group._get_backend(torch.device("cuda"))
    parent = getattr(parent, "wrapped_pg", parent)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    timeout, description = parent.options._timeout, f"{max_ctas} CTAs at most"
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=parent.options.is_high_priority_stream)
    options.config.max_ctas = max_ctas
    options._timeout = timeout
    ranks = dist.get_process_group_ranks(group)
    with _unbound(dist.group.WORLD) as device:
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout, "nccl", options, use_local_synchronization=True, group_desc=description
        )
    if device is not None:
        made.bound_device_id = device
    return made


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[torch.device | None]:
    """Let the block make groups as if the default group were bound to no device; yield the device.

    From one that is bound `new_group` would split off, for which ranks outside the new group would have to
    call it too. `split_group`, before torch 2.13, passes options of NCCL to all backends: gloo's crashes.
    """
    device = None if world is None else world.bound_device_id
    if device is None:
        yield None
        return
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def copied_group(group: dist.ProcessGroup, max_ctas: int) -> dist.ProcessGroup:
    """Return another group of the same ranks, without a limit: `make=` for CPU ranks, to see it at work."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def _check(max_ctas: Sequence[Limit]) -> None:
    if not max_ctas or isinstance(max_ctas, str):
        raise ValueError(f"max_ctas={max_ctas!r}: give at least one limit, as in {LIMITS}")
    for limit in max_ctas:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_ctas={max_ctas!r}: {limit!r} is no limit; it is at least 1, or None")
    if len(set(max_ctas)) < len(max_ctas):
        raise ValueError(f"max_ctas={max_ctas!r}: give each limit once")


def _has_nccl(group: dist.ProcessGroup) -> bool:
    """Return whether the group has NCCL; raises RuntimeError where that has no limits."""
    if not (dist.is_nccl_available() and "nccl" in dist.get_backend_config(group)):
        return False
    if not hasattr(getattr(dist.ProcessGroupNCCL.Options(), "config", None), "max_ctas"):
        raise RuntimeError(f"the NCCL of torch {torch.__version__} has no max_ctas; torch 2.11 on has it")
    return True
