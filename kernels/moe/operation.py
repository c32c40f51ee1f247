"""Base class of the operations over experts: token counts, choices of all ranks, failures."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ..agreement.ballots import COLLECTIVE, REFUSED_TERMS, TERMS_BITS, Ballots
from ..agreement.collective import Collective
from ..agreement.errors import RefusedByPeer
from ..exchange.call import NumberedCalls
from ..exchange.flags import ARRIVED, FLAGS, ROWS_SENT
from ..exchange.operation import INTERPRETED_PROGRAMS, Refusal
from ..exchange.push import Pushes
from ..launches.settled import SettledLaunches, ShapeLaunch
from ..signals import Failure
from ..symm import SymmetricMemoryError
from ..tensors import Apart, check_tensor, layout_of, lies_by_columns, remember
from .announcer import Announcer, ChoiceGatherer
from .flags import (
    GIVEN_OTHERS,
    MOST_CHOICES,
    MOST_TOKENS,
    NO_EXPERT,
    NOT_TOLD,
    OTHER_TOKENS,
    OTHER_TOPK,
    TOPK_SPAN,
)
from .launch import ExpertShape, counted, lies_for_tma, size_class
from .plan import Plan, Routing, shared_plan
from .routing import SHARED_DIGEST, digest_of

MOST_ROWS = 2**29  # places in the tables of tiles are int32
KINDS = ("call", "route", "by_expert")  # of calls, which all ranks make alike


def check_experts(weight: torch.Tensor, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `weight` is [E, N, columns], by rows or by columns, of this type and device."""
    needed = "[E, N, K] is needed, each at least 1"
    check_tensor("weight", weight, dtype, device, 3, needed, may_lie_by_columns=True)
    if 0 in weight.shape:
        raise ValueError(f"weight has shape {list(weight.shape)}; {needed}")
    if weight.shape[2] != columns:
        raise ValueError(f"weight has shape {list(weight.shape)}; its rows must have K={columns} elements")


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


def check_tokens(tokens: Sequence[int], own: int, rank: int, world_size: int, most: int) -> tuple[int, ...]:
    """Return the number of tokens of each rank, or raise where the caller cannot be right."""
    counts = tuple(int(count) for count in tokens)
    if len(counts) != world_size:
        raise ValueError(f"tokens={list(counts)} has {len(counts)} numbers; there are {world_size} ranks")
    if min(counts) < 0 or max(counts) > most:
        raise ValueError(f"tokens={list(counts)}; each must be 0 to tokens_per_rank={most}")
    if counts[rank] != own:
        raise ValueError(f"tokens={list(counts)}, but rank {rank}, this one, passes {own} tokens")
    return counts


class ExpertPlan(NamedTuple):
    """What a call's steps behind its arguments take; the tokens are `_told`."""

    kind: str  # one of KINDS
    experts: int
    topk: int
    has_weights: bool  # choices travel with them


class ExpertOperands(NamedTuple):
    """The tensors of a call."""

    rows: torch.Tensor  # the tokens of this rank, or the products of all
    weight: torch.Tensor
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    out: torch.Tensor
    routing: Routing | None
    factors: torch.Tensor | None = None  # in place of the weights of the routing


class ExpertOperation(NumberedCalls):
    """An operation whose calls begin by telling all ranks which experts each token goes to."""

    _orders: int  # how many orders of tiles its tables have, see `routing`
    _by_first: bool  # a tile belongs to its first stage, not to its last
    _way: ClassVar[str]  # the name of the `tunable` that chooses the collective
    _key: tuple[Hashable, ...]  # of that choice: columns and type of the operation
    _wrong_calls = (OTHER_TOKENS.value, OTHER_TOPK.value, NO_EXPERT.value, GIVEN_OTHERS.value)
    _refusal = Refusal(OTHER_TOPK.value, 0, TOPK_SPAN.value)  # a token of no choices
    _mend_calls = ""

    def __init__(
        self,
        tokens_per_rank: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        backend: str,
        timeout_s: float,
        max_topk: int,
        collective: bool | None,
    ) -> None:
        sizes = ("tokens_per_rank", tokens_per_rank, MOST_TOKENS), ("max_topk", max_topk, MOST_CHOICES)
        for name, size, most in sizes:
            if not hasattr(size, "__index__"):
                raise TypeError(f"{name}={size!r}; it must be an int, 1 to {most}")
            if not 1 <= size <= most:
                raise ValueError(f"{name}={size}; it must be 1 to {most}")
        self._capacity, self._max_topk, self._dtype = tokens_per_rank, max_topk, dtype
        self._group, self._timeout_s = group, timeout_s
        self._told: tuple[int, ...] = ()  # of the last call
        self._is_asking = False  # in this call the hosts exchange their tokens, and have not yet
        self._open_collective = functools.partial(
            Collective,
            type(self).__name__,
            self._way,
            group,
            fixed=collective,
            timeout_s=timeout_s,
            most_rows=math.inf,
        )
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        most = self.world_size * self._capacity * self._max_topk
        self._ids = self._memory.allocate((most,), torch.int64)
        self._weights = self._memory.allocate((most,), torch.float32)
        self._flags = self._memory.allocate((FLAGS, self.world_size), torch.int32)
        self._pushes = Pushes(self._memory, self._memory.side_stream(), self._flags)
        self._hosts, self._no_hosts = self._open_hosts()
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._checked: dict[Hashable, Apart] = {}  # by the layouts of tensors that have been checked
        self._launches: dict[Hashable, ShapeLaunch[ExpertShape]] = {}  # by all that they depend on
        self._announcer = Announcer(self._pushes)
        self._gatherer = ChoiceGatherer(self._memory, self._ids.local, self._weights.local)
        # Flags for a kernel of one rank: all is here.
        arrived = torch.zeros((FLAGS, 1), dtype=torch.int32, device=self.device)
        arrived[[ROWS_SENT.value, ARRIVED.value]] = 1
        self._arrived = self._memory.hold(arrived)
        self._collective = self._open_collective(self._memory)

    def _open_hosts(self) -> tuple[Ballots | None, str]:
        """Return the ballots by which hosts exchange their tokens, or why there are none."""
        if self.world_size == 1:
            return None, ""
        advice = "Pass tokens= on all ranks or on none, or find out what that rank is doing"
        try:  # it fails on all ranks or on none
            return Ballots(type(self).__name__, self._group, self._timeout_s, advice), ""
        except SymmetricMemoryError as error:
            return None, str(error)

    def _check_peers(self) -> None:
        self._collective.check()

    # ---- one call

    def _check_ids(self, topk_ids: torch.Tensor) -> None:
        """Raise unless this operation can take these choices."""
        check_choices("topk_ids", topk_ids, self.device, integers=True)
        own, topk = topk_ids.shape
        if own > self._capacity:
            raise ValueError(
                f"{own} tokens; this operation takes up to tokens_per_rank={self._capacity} of each rank"
            )
        if not 1 <= topk <= self._max_topk:
            raise ValueError(
                f"topk_ids has {topk} choices a token; this operation takes 1 to max_topk={self._max_topk}"
            )
        if self.world_size * self._capacity * topk >= MOST_ROWS:
            raise ValueError(
                f"{self.world_size} x {self._capacity} tokens with topk={topk} are 2**29 rows or more"
            )

    def _check_weights(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Raise unless each of these choices has a weight."""
        check_choices("topk_weights", topk_weights, self.device, integers=False)
        if topk_weights.shape != topk_ids.shape:
            given = f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}"
            raise ValueError(f"{given} must be of one shape")

    def _learn_tokens(
        self,
        own: int,
        tokens: Sequence[int] | None,
        check: Callable[[tuple[int, ...]], None],
        *,
        is_capturing: bool,
    ) -> None:
        """Learn the tokens of all ranks; if they are not given, wait for the hosts of all peers.

        check: raises unless the arguments suit them. See [Note: what the host must know].
        """
        if tokens is not None:
            told = check_tokens(tokens, own, self.rank, self.world_size, self._capacity)
        elif self.world_size == 1:
            told = (own,)
        else:
            if is_capturing:
                name = type(self).__name__
                raise RuntimeError(
                    f"a captured call of {name} needs tokens=, the number of tokens of each rank"
                )
            if self._hosts is None:
                raise RuntimeError(f"pass tokens=, the number of tokens of each rank: {self._no_hosts}")
            told = tuple(self._exchange_tokens(own).values())
        self._told = told
        check(told)

    def _exchange_tokens(self, own: int) -> dict[int, int]:
        """Return what each rank names; raise RefusedByPeer where one refuses the call."""
        assert self._hosts is not None
        self._is_asking = False
        named = self._hosts.exchange(own)
        if REFUSED_TERMS in named.values():
            raise RefusedByPeer
        return named

    def _begin_plan(self, kind: str, tokens: Sequence[int] | None, *, is_capturing: bool) -> None:
        self._is_asking = (
            kind != "by_expert" and tokens is None and self._hosts is not None and not is_capturing
        )

    def _agree(self, plan: ExpertPlan, is_capturing: bool) -> bool:
        kind, experts, topk, _ = plan
        most_tokens = max(self._told)
        key, of_size = (kind, experts, topk, *self._key), size_class(self.world_size * most_tokens)
        vote = self._collective.vote(of_size, key) if most_tokens > 0 else 0
        key = (of_size, most_tokens > 0, *key)
        return bool(self._collective.agree(key, self._terms(plan), vote=vote, is_capturing=is_capturing))

    def _terms(self, plan: ExpertPlan) -> int:
        return digest_of((KINDS.index(plan.kind), plan.experts, plan.topk, *self._told))

    def _tell(self, plan: ExpertPlan, operands: ExpertOperands, *, is_gathered: bool, at_once: bool) -> None:
        """Enqueue permits and choices, or the collective of choices."""
        is_shared, topk_ids = plan.kind == "route", operands.topk_ids
        if is_gathered:
            if topk_ids is not None:
                of_call = (max(self._told) * plan.topk, self._digest(is_shared))
                self._gatherer.gather(self._collective, topk_ids, operands.topk_weights, *of_call)
        elif topk_ids is None:
            self._announcer.permit(at_once=at_once)
        else:
            self._announce(topk_ids, operands.topk_weights, is_shared, at_once=at_once)

    def _announce(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, is_shared: bool, *, at_once: bool
    ) -> None:
        """Put the choices in their place and enqueue their announcement."""
        tokens, topk = topk_ids.shape
        given = [(self._ids, topk_ids)]
        if topk_weights is not None:
            given.append((self._weights, topk_weights))
        begin = self.rank * self._capacity * topk
        for told, choices in given:
            if tokens:
                told.local[begin : begin + tokens * topk].copy_(choices.detach().reshape(-1))
        lists = tuple(told for told, _ in given)
        of_call = (tokens, topk, self._capacity * topk, self._digest(is_shared))
        self._announcer.announce(lists, *of_call, at_once=at_once)

    def _digest(self, is_shared: bool) -> int:
        return digest_of(self._told) + (SHARED_DIGEST.value if is_shared else 0)

    def _sort(self, topk_ids: torch.Tensor, experts: int, first: int, *, is_gathered: bool) -> Plan:
        """Enqueue the sorting of the choices of all ranks, chunk `first` first; return where they will be."""
        topk, stages = topk_ids.shape[1], 1 if is_gathered else self.world_size
        plan = self._plans.get((experts, topk, stages))
        if plan is None:
            plan = self._plans[experts, topk, stages] = Plan(
                world_size=self.world_size,
                experts=experts,
                most=self.world_size * self._capacity * topk,
                orders=self._orders,
                by_first=self._by_first,
                device=self.device,
                stages=stages,
            )
            self._memory.hold(plan.words)
        self._fill(plan, topk_ids, first, is_gathered=is_gathered)
        return plan

    def _route(self, topk_ids: torch.Tensor, experts: int, *, is_gathered: bool) -> Routing:
        """Enqueue a sorting of the choices and weights of all ranks that both operations of a layer share."""
        topk = topk_ids.shape[1]
        plan = shared_plan(self.world_size, experts, sum(self._told) * topk, self.device)
        self._fill(plan, topk_ids, self.rank, self._weights.local, is_gathered=is_gathered)
        return Routing(plan, self._told, topk)

    def _fill(
        self,
        plan: Plan,
        topk_ids: torch.Tensor,
        first: int,
        weights: torch.Tensor | None = None,
        *,
        is_gathered: bool,
    ) -> None:
        tokens, topk = topk_ids.shape
        stride = topk * (max(self._told) if is_gathered else self._capacity)
        if is_gathered:
            self._gatherer.deliver(stride)
        plan.sort(
            self._ids.local,
            self._gatherer.flags if is_gathered else self._flags.local,
            self._errors,
            pairs=sum(self._told) * topk,
            topk=topk,
            stride=stride,
            tokens=tokens,
            told=self._digest(weights is not None),
            rank=self.rank,
            first=first % self.world_size,
            patience_ticks=self._patience_ticks,
            weights=weights,
        )

    def _check_routing(self, routing: Routing, weight: torch.Tensor) -> None:
        """Raise unless this operation can carry out a call with the choices of the routing."""
        tokens, experts = routing.tokens, routing.plan.experts
        if len(tokens) != self.world_size or max(tokens) > self._capacity:
            room = f"{self.world_size} ranks of up to {self._capacity} tokens"
            raise ValueError(f"the routing is of tokens {list(tokens)}; this operation is open for {room}")
        if weight.shape[0] != experts:
            raise ValueError(f"weight has {weight.shape[0]} experts, the routing is of {experts}")
        self._told = tokens

    def _launch_of(
        self,
        launches: SettledLaunches[ExpertShape],
        choices: int,
        weight: torch.Tensor,
        strides: tuple[int, ...],
        tensors: tuple[torch.Tensor, ...],
        *,
        is_sorted: bool,
        is_gathered: bool,
        **constants: Any,
    ) -> ShapeLaunch[ExpertShape]:
        """Return the launches of the grouped GEMM for such tensors; is_gathered: as of a single rank.

        constants: constexprs that `ExpertShape` does not have; the other arguments determine them.
        """
        aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])
        key = choices, layout_of(weight), strides, aligned, is_sorted, is_gathered
        launch = self._launches.get(key)
        if launch is not None:
            return launch
        experts, columns, k = weight.shape
        programs = self._sms or INTERPRETED_PROGRAMS
        sizes = (counted(choices, programs), size_class(choices), columns, k, experts)
        layout = (self._has_tma and lies_for_tma(weight), lies_by_columns(weight))
        compiled_for = (weight.dtype, weight.device, aligned, *layout)
        ranks = 1 if is_gathered else self.world_size
        shape = ExpertShape(*sizes, strides, ranks, programs, *compiled_for, self._upcasts, is_sorted)
        numbers = tuple(shape.sizes().values())
        launch = ShapeLaunch(launches, shape, constants=constants, numbers=numbers)
        return remember(self._launches, key, launch)

    # ---- calls that fail

    def _ask_peers(self) -> tuple[int, int] | None:
        if self._is_asking:
            self._exchange_tokens(REFUSED_TERMS)  # it raises on all ranks
        return super()._ask_peers()

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        if went_ahead is None or went_ahead[0] != COLLECTIVE:
            if given and given[0] == "by_expert" and not self._bulletin.is_shared:
                raise RuntimeError("a kernel that sorts nothing cannot tell that a rank has refused the call")
            self._stand_in_by_pushes(self._flags.local, counted=False)
            return
        plan = self._plan_of(*given) if given else None
        if plan is None or self._terms(plan) % 2**TERMS_BITS != went_ahead[1]:
            raise RuntimeError("peers make collectives, of sizes that this rank does not know")
        for make in self._collectives(plan):
            make()

    def _plan_of(
        self,
        kind: str,
        _: Any,
        weight: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        __: Any,
        tokens: Sequence[int] | None,
        routing: Routing | None,
        *___: Any,
    ) -> ExpertPlan:
        """Return the plan of a call that this rank has refused, as far as its arguments are those of all."""
        if routing is not None:
            self._told = routing.tokens
            return ExpertPlan(kind, len(weight), routing.topk, has_weights=False)
        assert topk_ids is not None
        if tokens is not None:
            self._told = tuple(tokens)
        return ExpertPlan(kind, len(weight), topk_ids.shape[1], topk_weights is not None)

    def _collectives(self, plan: ExpertPlan) -> list[Callable[[], None]]:
        gather = functools.partial(self._gather_nothing, plan)
        return [*([] if plan.kind == "by_expert" else [gather]), self._take_part]

    def _gather_nothing(self, plan: ExpertPlan) -> None:
        messages = self._gatherer.messages(max(self._told) * plan.topk, has_weights=plan.has_weights)
        own = messages[self.rank].zero_()
        own[:1].fill_(self._refusal.mark)  # in place of ROWS_SENT
        self._collective.all_gather(messages.view(-1), own)

    @abc.abstractmethod
    def _take_part(self) -> None:
        """Make the collective of rows, or of sums, with any data."""

    def _leave_hosts(self) -> None:
        super()._leave_hosts()
        if self._hosts is not None:
            self._hosts.leave()

    # ---- what went wrong

    def _describe(self, peer: int, failure: Failure) -> str:
        if failure.kind == NOT_TOLD.value:
            return f"rank {peer}, or one that it waits for, did not send its choices in time"
        if failure.kind == OTHER_TOPK.value:
            return f"rank {peer} has {failure.seen} choices a token, not as many as this rank"
        if failure.kind == NO_EXPERT.value:
            return f"rank {peer} chose expert {failure.seen}, which weight does not have (-1 drops a choice)"
        if failure.kind == GIVEN_OTHERS.value:
            return f"rank {peer} was given other tokens= than the ranks have, or one of them called route()"
        if failure.kind == OTHER_TOKENS.value:
            return ""  # one text for all ranks
        return self._describe_wait(peer, failure)

    @abc.abstractmethod
    def _describe_wait(self, peer: int, failure: Failure) -> str:
        """Return a sentence about the subclass's own wait that ended in vain."""

    def _describe_all(self, failures: dict[int, Failure]) -> list[str]:
        """Return a sentence if this rank's caller passed other tokens than the peers have."""
        seen = {p: each.seen for p, each in failures.items() if each.kind == OTHER_TOKENS.value}
        if not seen:
            return []
        wrong = [f"rank {p} has {count}" for p, count in seen.items() if self._told[p : p + 1] != (count,)]
        if not wrong:  # it was an earlier call
            wrong = [f"rank {p} had {count}" for p, count in seen.items()]
        return [f"tokens={list(self._told)} here, but {', '.join(wrong)}"]
