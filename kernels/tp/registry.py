"""The operations that all layers of a model share: found by what they move, opened at the first call.

A workspace holds what one call needs and nothing of the call before, so layers of the same width take turns
in one. Opening, growing and closing are collective: ranks make the same calls in the same order.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from ..ag_gemm import AllGatherGemm
from ..agreement.ballots import Ballots
from ..agreement.errors import PeerTimeout
from ..exchange.call import NumberedCalls
from ..gemm_ar import GemmAllReduce
from ..gemm_rs import GemmReduceScatter

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | str | None

Kind = TypeVar("Kind", bound=NumberedCalls)
_group_of: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]

GROWTH = 1.5  # of a workspace that has become too small, at least: sequences that lengthen open few
TIMEOUT_S = 300.0
MOST_ROWS = 2**24 - 1  # that a ballot can tell apart


class Key(NamedTuple):
    """Identifies the calls that share a workspace, up to its number of rows."""

    kind: type[NumberedCalls]
    group_name: str
    columns: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Workspace:
    """An open operation, and how many rows it takes."""

    operation: NumberedCalls
    group: dist.ProcessGroup
    rows: int
    timeout_s: float
    announce: Callable[[int], None] | None = None  # to the peers, that many rows; once a call has come


def name_of(group: Group) -> str:
    """Return the name by which operators know the group; None is the default group."""
    if isinstance(group, str):
        return group
    if group is not None and isinstance(group, DeviceMesh):
        if group.ndim != 1:
            dimensions = group.mesh_dim_names or group.shape
            raise ValueError(f"the mesh has dimensions {dimensions}; pass one, mesh['tp']")
        group = group.get_group()
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:  # what new_group returns to ranks that it leaves out
        raise ValueError(f"global rank {dist.get_rank()} is not a member of the group that was given")
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no default process group; call torch.distributed.init_process_group")
    name: str = group.group_name
    return name


@torch.compiler.assume_constant_result  # of what is traced: groups do not change their size
def size_of(group_name: str) -> int:
    """Return how many ranks the group has."""
    return _group_of(group_name).size()


class Announcements:
    """Tells the peers' hosts, in shared memory, the rows of each call; opening is collective.

    A rank whose workspace is large enough waits for nobody. One that must open a larger one, which is
    collective, first compares the rows of all ranks: if they differ it would wait in a collective for a rank
    that is in a kernel, and with NCCL meet that rank's next collective. Raises SymmetricMemoryError on all
    ranks where one cannot map a peer's words.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group = group  # a new one may have the same name
        self._rank, self._call = group.rank(), ""
        self._ballots = Ballots("tensor parallelism", group, timeout_s)

    def announce(self, call: str, word: int, rows: int) -> None:
        """Say what this rank is about to call, and with how many rows; word: of the call, see `_call_of`."""
        self._call = call
        self._ballots.cast(word | min(rows, MOST_ROWS))

    def require_equal(self) -> None:
        """Wait for what the peers say of the same call; raise ValueError if one says something else."""
        text = self._difference(self._ballots.read())
        if text:
            raise ValueError(text)

    def explain(self) -> str:
        """Return how the peers' last announcements differ from this rank's; "" if they do not, or not yet."""
        return self._difference(self._ballots.read_said())

    def _difference(self, said: dict[int, int]) -> str:
        own = said[self._rank]
        if all(each == own for each in said.values()):
            return ""
        if any(each >> 24 != own >> 24 for each in said.values()):
            others = [rank for rank, each in said.items() if each >> 24 != own >> 24]
            return f"rank {self._rank} calls {self._call}, ranks {others} something else at this point"
        rows = ", ".join(f"rank {rank}: {each & MOST_ROWS}" for rank, each in sorted(said.items()))
        return f"{self._call}: every rank must pass as many rows; {rows}"


class Workspaces:
    """The workspaces of this process. Operators, which get tensors alone, reach them by `WORKSPACES`."""

    def __init__(self) -> None:
        self.open: dict[Key, Workspace] = {}
        self.outgrown: list[tuple[Key, Workspace]] = []  # graphs replay in them
        self._announcements: dict[str, Announcements] = {}  # by the group's name
        self.meeting: dict[str, dist.ProcessGroup] = {}  # whose calls begin when all have come, by name

    def find(self, key: Key) -> Workspace | None:
        """Return what is open for the key, unless its group is gone: a new one may have the same name."""
        found = self.open.get(key)
        if found is not None and found.group is not _group_of(key.group_name):
            _close(key, self.open.pop(key))
            return None
        return found

    def replace(self, key: Key, outgrown: Workspace | None, rows: int, timeout_s: float) -> Workspace:
        """Open a workspace of so many rows, where a smaller one makes room unless a graph needs it."""
        self.abandon_dead()
        if outgrown is not None:
            del self.open[key]
            if outgrown.operation.is_captured:  # a graph may replay in its memory
                self.outgrown.append((key, outgrown))
            else:
                _close(key, outgrown)
        group = _group_of(key.group_name)
        open_one: Any = key.kind
        operation = open_one(rows, key.columns, key.dtype, group, timeout_s=timeout_s)
        if self.meeting.get(key.group_name) is group:
            operation.meet_first()
        self.open[key] = workspace = Workspace(operation, group, rows, timeout_s)
        return workspace

    def announce(self, key: Key, rows: int, group: dist.ProcessGroup, timeout_s: float) -> Announcements:
        """Tell the peers of a call; the first one of a group is collective."""
        found = self._announcements.get(key.group_name)
        if found is None or found.group is not group:  # a new one may have the same name
            found = self._announcements[key.group_name] = Announcements(group, timeout_s)
        found.announce(*_call_of(key), rows)
        return found

    def take(self, wanted: Callable[[Key, Workspace], bool]) -> list[tuple[Key, Workspace]]:
        """Return the workspaces that are wanted, and forget them: the oldest first."""
        every = [*self.outgrown, *self.open.items()]
        taken = [each for each in every if wanted(*each)]
        places = {id(workspace) for _, workspace in taken}
        self.outgrown = [each for each in self.outgrown if id(each[1]) not in places]
        self.open = {key: each for key, each in self.open.items() if id(each) not in places}
        return taken

    def forget(self, group_name: str) -> None:
        """Let go of what the ranks of a group have announced."""
        self._announcements.pop(group_name, None)

    def abandon_dead(self) -> None:
        """Let go of workspaces whose groups are gone: there is nobody to meet."""
        for _, workspace in self.take(lambda key, each: not _is_alive(key, each)):
            workspace.operation.abandon()
        gone = [name for name, each in self._announcements.items() if _find_group(name) is not each.group]
        for name in gone:
            del self._announcements[name]
        meeting = self.meeting.items()
        self.meeting = {name: group for name, group in meeting if _find_group(name) is group}


WORKSPACES = Workspaces()


def meet_first(group: Group = None) -> None:
    """Have the kernels of each eager call begin when all ranks of the group have come to it; collective.

    For ranks that also send to each other outside of the group, as pipelines do: see
    `exchange.operation.Operation.meet_first`.
    """
    group_name = name_of(group)
    WORKSPACES.meeting[group_name] = _group_of(group_name)
    for key, workspace in WORKSPACES.open.items():
        if key.group_name == group_name and _is_alive(key, workspace):
            workspace.operation.meet_first()


def reserve(
    tokens: int,
    features: int,
    dtype: torch.dtype,
    group: Group = None,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = TIMEOUT_S,
    all_reduce: bool = False,
) -> None:
    """Open what calls of up to so many tokens, of all ranks together, with so many features need.

    all_reduce: what `matmul_all_reduce` needs, and nothing else.

    Without it the first call opens as much as it needs, and a larger one half as much again, which a captured
    call cannot. `MoE` opens its own at its first call. timeout_s: how long a kernel waits for a peer.
    Collective.
    """
    group_name = name_of(group)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # as tensors there have it
        device = torch.device("cuda", torch.cuda.current_device())
    per_rank = -(-tokens // size_of(group_name))
    kinds: list[tuple[type[NumberedCalls], int]] = [(AllGatherGemm, per_rank), (GemmReduceScatter, tokens)]
    for kind, rows in [(GemmAllReduce, tokens)] if all_reduce else kinds:
        key = Key(kind, group_name, features, dtype, device)
        found = WORKSPACES.find(key)
        if found is None or found.rows < rows:
            WORKSPACES.replace(key, found, rows, timeout_s)


def release(group: Group = None, *, features: int | None = None, dtype: torch.dtype | None = None) -> None:
    """Close the workspaces of the group and raise what went wrong in its calls; collective.

    features, dtype: of those to close; None: any. To be called before the group is destroyed, and after a
    call has failed: the next call opens new ones. Graphs that hold calls must not be replayed any more, also
    in workspaces that have been outgrown. What is left of a group that is gone goes when the next one opens.
    """
    group_name, failures = name_of(group), []

    def wanted(key: Key, _: Workspace) -> bool:
        alike = features in (None, key.columns) and dtype in (None, key.dtype)
        return alike and key.group_name == group_name

    taken = WORKSPACES.take(wanted)
    if features is None and dtype is None:
        WORKSPACES.forget(group_name)
    for key, workspace in taken:
        try:
            _close(key, workspace)
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]


def opened(kind: type[Kind], tensor: torch.Tensor, rows: int, columns: int, group_name: str) -> Kind:
    """Return an operation of that kind for so many rows, of the type and device of `tensor`.

    rows, columns: what it is opened with. It is opened or grown if there is none: then this is collective,
    and a ValueError where ranks come with different numbers of rows.
    """
    key = Key(kind, group_name, columns, tensor.dtype, tensor.device)
    found, announced = WORKSPACES.find(key), None
    has_room = found is not None and rows <= found.rows
    if _is_capturing(tensor):  # nothing is announced: ranks may capture a call more or less often
        if found is not None and has_room:
            return found.operation  # type: ignore[return-value]  # of the key's kind
        asked = f"a captured call of {rows} rows of {columns} features in {tensor.dtype}"
        room = "no workspace" if found is None else f"a workspace of {found.rows} rows"
        raise RuntimeError(f"{asked} found {room}: call once before the capture, or reserve() it")
    if found is not None and has_room and found.announce is not None:
        found.announce(rows)
        return found.operation  # type: ignore[return-value]
    group, timeout_s = (_group_of(group_name), TIMEOUT_S) if found is None else (found.group, found.timeout_s)
    if group.size() > 1:
        announced = WORKSPACES.announce(key, rows, group, timeout_s)
    if found is None or not has_room:
        if announced is not None:
            try:
                announced.require_equal()
            except (ValueError, PeerTimeout) as error:
                if found is not None:
                    found.operation.refuse(str(error))
                raise
        grown = rows if found is None else max(rows, int(GROWTH * found.rows))
        found = WORKSPACES.replace(key, found, grown, timeout_s)
    found.announce = lambda rows: None
    if announced is not None:
        found.operation.explain = announced.explain
        found.announce = functools.partial(announced.announce, *_call_of(key))
    assert isinstance(found.operation, kind)
    return found.operation


def announce_none(kind: type[NumberedCalls], tensor: torch.Tensor, columns: int, group_name: str) -> None:
    """Tell the peers of a call without rows, which needs no operation; ValueError where one has some."""
    key, group = Key(kind, group_name, columns, tensor.dtype, tensor.device), _group_of(group_name)
    if group.size() == 1 or _is_capturing(tensor):
        return
    found = WORKSPACES.find(key)
    try:
        WORKSPACES.announce(key, 0, group, found.timeout_s if found else TIMEOUT_S).require_equal()
    except (ValueError, PeerTimeout) as error:
        if found is not None:
            found.operation.refuse(str(error))
        raise


@functools.lru_cache
def _call_of(key: Key) -> tuple[str, int]:
    """Return how this rank explains such calls, and the upper bits of their ballots; the lower are rows."""
    text = f"{key.kind.__name__} of {key.columns} features in {key.dtype}"
    return text, zlib.crc32(text.encode()) % 2**7 << 24 | 2**31


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _find_group(group_name: str) -> dist.ProcessGroup | None:
    """Return the group of that name, if there is one."""
    try:
        return _group_of(group_name)
    except (LookupError, RuntimeError, ValueError):
        return None


def _is_alive(key: Key, workspace: Workspace) -> bool:
    return _find_group(key.group_name) is workspace.group


def _close(key: Key, workspace: Workspace) -> None:
    if _is_alive(key, workspace):
        workspace.operation.close()
    else:  # there are no peers to meet
        workspace.operation.abandon()
