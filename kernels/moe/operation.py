"""Base class of the operations over experts: token counts, choices of all ranks, failures."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..agreement.ballots import COLLECTIVE
from ..agreement.failures import FailureKinds, Refusal
from ..configs import upcasts
from ..exchange.call import NumberedCalls
from ..exchange.flags import FLAGS
from ..exchange.push import Pushes
from ..launches.settled import TunedKernel, TunedLaunch
from ..signals import Failure
from ..tensors import Apart, check_no_gradient, layout_of, lies_by_columns, remember
from .announcer import (
    GIVEN_OTHERS,
    MOST_CHOICES,
    MOST_TOKENS,
    NO_EXPERT,
    NOT_COMPUTED,
    NOT_TOLD,
    OTHER_TOKENS,
    OTHER_TOPK,
    TOPK_SPAN,
    Announcer,
    ChoiceGatherer,
)
from .launch import counted, grid_of_experts, lies_for_tma, size_class
from .plan import BY_EXPERT, Plan, Routing, Sorting, shared_plan
from .routing import SHARED_DIGEST, digest_of
from .tokens import TokenCounts, check_ids, check_weights

KINDS = ("call", "route", "by_expert")  # of calls, which all ranks make alike


class ExpertPlan(NamedTuple):
    """What a call's steps after its arguments take; the tokens are `_told`."""

    kind: str  # one of KINDS
    experts: int
    topk: int


class ExpertOperands(NamedTuple):
    """The tensors of a call; those of its choices are None where a routing has sorted them."""

    rows: torch.Tensor  # the tokens of this rank, or the products of all
    weight: torch.Tensor
    topk_ids: Any = None
    topk_weights: Any = None
    out: Any = None
    routing: Routing | None = None
    factors: torch.Tensor | None = None  # in place of the weights of the routing


class TileOrders(NamedTuple):
    """The orders of tiles that the tables of an operation have, see `routing`."""

    orders: int
    by_first: bool  # the own chunk is visited last, and a tile belongs to its first stage, not to its last
    shared: int  # that of a routing, unless all ranks' chunks are here


class ExpertOperation(NumberedCalls):
    """An operation whose calls begin by telling all ranks which experts each token goes to."""

    _tile_orders: TileOrders
    _rows_name: str  # of the argument
    _weighted: str  # the kind of calls whose choices have weights
    _key: tuple[Hashable, ...]  # of that choice: columns and type of the operation
    _failure_kinds = FailureKinds(
        {
            NOT_TOLD.value: "rank {peer}, or one that it waits for, did not send its choices in time",
            OTHER_TOPK.value: "rank {peer} has {seen} choices a token, not as many as this rank",
            NO_EXPERT.value: "rank {peer} chose expert {seen}, which weight does not have (-1 drops a "
            "choice)",
            GIVEN_OTHERS.value: "rank {peer} was given other tokens= than the ranks have, or one of them "
            "called route()",
            OTHER_TOKENS.value: "",  # one text for all ranks
            NOT_COMPUTED.value: "the products of this rank were not stored in time ({seen} tiles of a part "
            "were)",
        },
        of_callers=(OTHER_TOKENS.value, OTHER_TOPK.value, NO_EXPERT.value, GIVEN_OTHERS.value),
        advice="",
        refusal=Refusal(OTHER_TOPK.value, 0, TOPK_SPAN.value),  # a token of no choices
    )

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
        self._told: tuple[int, ...] = ()  # of the last call
        self._makes_collectives = collective
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        self._flags = self._memory.allocate((FLAGS, self.world_size), torch.int32)
        self._pushes = Pushes(self._memory, self._memory.side_stream(), self._flags)
        self._tokens = TokenCounts(type(self).__name__, self._capacity, self._memory)
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._checked: dict[Hashable, Apart] = {}  # by the layouts of tensors that have been checked
        self._launches: dict[Hashable, TunedLaunch] = {}  # by all that they depend on
        self._announcer = Announcer(self._pushes, self._capacity, self._max_topk)
        of_all = self._announcer.ids.local, self._announcer.weights.local
        self._gatherer = ChoiceGatherer(self._memory, *of_all)
        self._collective = self._open_collective(self._makes_collectives, most_rows=math.inf)

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> ExpertPlan:
        kind, tokens, operands = given
        rows, weight, topk_ids, topk_weights, out, routing, _ = operands
        self._tokens.begin_call(is_eager=not is_capturing)
        check_no_gradient(type(self).__name__, **self._differentiable(operands))
        if routing is not None:
            self._check_operands(operands)
            self._check_routing(routing, weight)
            self._tokens.name_all()
            self._check_rows(operands, routing.topk)
            return ExpertPlan(kind, weight.shape[0], routing.topk)
        lies = (self._layout_of(rows), self._layout_of(out), *map(layout_of, operands[1:4]))
        apart = self._checked.get((kind, lies))
        if apart is None:
            self._check_operands(operands)
            check_ids(topk_ids, self.device, self.world_size, self._capacity, self._max_topk)
            if kind == self._weighted:
                check_weights(topk_weights, topk_ids)
            self._check_result(operands)
            read = {self._rows_name: rows, "weight": weight, "topk_ids": topk_ids}
            apart = remember(self._checked, (kind, lies), Apart(out, **read, topk_weights=topk_weights))
        apart.check(out, rows, weight, topk_ids, topk_weights)
        own, topk = topk_ids.shape
        self._told = self._tokens.learn(own, tokens, is_capturing=is_capturing)
        self._check_rows(operands, topk)
        return ExpertPlan(kind, weight.shape[0], topk)

    def _layout_of(self, tensor: Any) -> Hashable:
        return layout_of(tensor)

    @abc.abstractmethod
    def _differentiable(self, operands: ExpertOperands) -> dict[str, torch.Tensor | None]:
        """Return the arguments that may ask for a gradient, by their names."""

    @abc.abstractmethod
    def _check_operands(self, operands: ExpertOperands) -> None:
        """Raise unless this operation can multiply rows and weight."""

    @abc.abstractmethod
    def _check_result(self, operands: ExpertOperands) -> None:
        """Raise unless rows and `out` suit this rank's choices."""

    @abc.abstractmethod
    def _check_rows(self, operands: ExpertOperands, topk: int) -> None:
        """Raise unless the arguments suit the tokens of all ranks."""

    def _allocate_results(self, plan: ExpertPlan, given: tuple[Any, ...]) -> ExpertOperands:
        _, _, operands = given
        if operands.out is None:
            shape = self._result_shape(plan, operands)
            return operands._replace(out=operands.rows.new_empty(shape))
        return operands

    @abc.abstractmethod
    def _result_shape(self, plan: ExpertPlan, operands: ExpertOperands) -> tuple[int, int]:
        """Return the shape of the result."""

    def _agree(self, plan: ExpertPlan, is_capturing: bool) -> bool:
        kind, experts, topk = plan
        most_tokens = max(self._told)
        key, of_size = (kind, experts, topk, *self._key), size_class(self.world_size * most_tokens)
        vote = self._collective.vote(of_size, key) if most_tokens > 0 else 0
        key = (of_size, most_tokens > 0, *key)
        of_kind = KINDS.index(kind)
        terms = digest_of((of_kind, experts, topk, *self._told))
        sizes = (most_tokens * TOPK_SPAN.value + topk) * len(KINDS) + of_kind
        return bool(self._collective.agree(key, terms, sizes, vote=vote, is_capturing=is_capturing))

    def _tell(self, plan: ExpertPlan, operands: ExpertOperands, *, is_gathered: bool, at_once: bool) -> None:
        """Enqueue permits and choices, or the collective of choices."""
        is_shared, topk_ids = plan.kind == "route", operands.topk_ids
        if operands.routing is not None:
            if not is_gathered:
                self._announcer.permit(at_once=at_once)
        elif is_gathered:
            of_call = (max(self._told) * plan.topk, self._digest(is_shared))
            self._gatherer.gather(self._collective, topk_ids, operands.topk_weights, *of_call)
        else:
            given = self._digest(is_shared)
            self._announcer.announce(topk_ids, operands.topk_weights, given, at_once=at_once)

    def _digest(self, is_shared: bool) -> int:
        return self._tokens.digest(self._told) + (SHARED_DIGEST.value if is_shared else 0)

    def _sort(self, of_call: ExpertPlan, operands: ExpertOperands, *, is_gathered: bool) -> Sorting:
        """Return the choices of all ranks as a kernel reads them; enqueue their sorting unless it is made."""
        routing, topk = operands.routing, of_call.topk
        if of_call.kind == "call":
            plan = self._plan_for(of_call.experts, topk, stages=1 if is_gathered else self.world_size)
            first = (
                self.rank + self._tile_orders.by_first
            ) % self.world_size  # the own chunk, or the one behind it
            self._fill(plan, operands.topk_ids, first, is_gathered=is_gathered)
            return Sorting(plan, topk, 0, None, is_gathered)
        if routing is None:  # of the choices and weights of all ranks, for both operations of a layer
            plan = shared_plan(self.world_size, of_call.experts, sum(self._told) * topk, self.device)
            weights = self._announcer.weights.local
            self._fill(plan, operands.topk_ids, self.rank, weights, is_gathered=is_gathered)
            routing = Routing(plan, self._told, topk)
        order = BY_EXPERT if is_gathered else self._tile_orders.shared
        return Sorting(routing.plan, topk, order, routing, is_gathered)

    def _plan_for(self, experts: int, topk: int, stages: int) -> Plan:
        """Return the memory of sortings that end with their call."""
        plan = self._plans.get((experts, topk, stages))
        if plan is None:
            plan = self._plans[experts, topk, stages] = Plan(
                world_size=self.world_size,
                experts=experts,
                most=self.world_size * self._capacity * topk,
                orders=self._tile_orders.orders,
                by_first=self._tile_orders.by_first,
                device=self.device,
                stages=stages,
            )
            self._memory.hold(plan.words)
        return plan

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
            self._announcer.ids.local,
            self._gatherer.flags if is_gathered else self._flags.local,
            self._failures.words,
            pairs=sum(self._told) * topk,
            topk=topk,
            stride=stride,
            tokens=tokens,
            told=self._digest(weights is not None),
            rank=self.rank,
            first=first,
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
        kernel: TunedKernel,
        choices: int,
        weight: torch.Tensor,
        strides: tuple[int, ...],
        tensors: tuple[torch.Tensor, ...],
        sorting: Sorting,
        held: tuple[torch.Tensor, ...] = (),
        **constants: Any,
    ) -> TunedLaunch:
        """Return the launches of the grouped GEMM for such tensors.

        held: the kernel's first arguments, which are the same in all launches. constants: constexprs that
        only this kernel has.
        """
        aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])
        programs = self._facts.programs
        of_choices = counted(choices, programs), size_class(choices)
        of_sorting = sorting.is_shared, sorting.is_gathered
        key = of_choices, layout_of(weight), strides, aligned, *of_sorting, *constants.values()
        launch = self._launches.get(key)
        if launch is not None:
            return launch
        experts, columns, k = weight.shape
        constants |= {
            "WORLD": 1 if sorting.is_gathered else self.world_size,
            "TMA_LEGAL": self._facts.has_tma and lies_for_tma(weight),
            "BY_COLUMNS": lies_by_columns(weight),
            "UPCAST": upcasts(self._dtype),
            "SORTED": sorting.is_shared,
        }
        grid = grid_of_experts(of_choices[0], columns, experts, programs)
        numbers = (of_choices[1], columns, k, experts)
        launch = TunedLaunch(kernel, grid, constants, held=held, numbers=numbers)
        return remember(self._launches, key, launch)

    # ---- calls that fail

    def _ask_peers(self) -> tuple[int, int] | None:
        self._tokens.refuse()  # it raises where all ranks end the call there
        return super()._ask_peers()

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        if went_ahead is None or went_ahead[0] != COLLECTIVE:
            announced = not given or given[0] != "by_expert"
            if not (announced or self._bulletin.is_shared):
                raise RuntimeError("a kernel that sorts nothing cannot tell that a rank has refused the call")
            self._stand_in_by_pushes(self._flags.local, counted=False, announced=announced)
            return
        sizes, kind = divmod(went_ahead[1], len(KINDS))  # as `_agree` names them
        for make in self._collectives_of(KINDS[kind], *divmod(sizes, TOPK_SPAN.value)):
            make()

    def _collectives(self, plan: ExpertPlan) -> list[Callable[[], None]]:
        return self._collectives_of(plan.kind, max(self._told), plan.topk)

    def _collectives_of(self, kind: str, most_tokens: int, topk: int) -> list[Callable[[], None]]:
        """Return the collectives of such a call; most_tokens: of the rank that has most."""
        has_weights = kind == self._weighted
        gather = functools.partial(self._gather_nothing, most_tokens * topk, has_weights=has_weights)
        take_part = functools.partial(self._take_part, most_tokens)
        return [take_part] if kind == "by_expert" else [gather, take_part]

    def _gather_nothing(self, room: int, *, has_weights: bool) -> None:
        messages = self._gatherer.messages(room, has_weights=has_weights)
        own = messages[self.rank].zero_()
        own[:1].fill_(self._failure_kinds.refusal.mark)  # in place of ROWS_SENT
        self._collective.all_gather(messages.view(-1), own)

    @abc.abstractmethod
    def _take_part(self, rows: int) -> None:
        """Make the collective of so many rows of each rank, or of sums, with any data."""

    def _leave_hosts(self) -> None:
        super()._leave_hosts()
        self._tokens.leave()

    # ---- what went wrong

    def _describe_all(self, failures: dict[int, Failure]) -> list[str]:
        """Return a sentence if this rank's caller passed other tokens than the peers have."""
        seen = {p: each.seen for p, each in failures.items() if each.kind == OTHER_TOKENS.value}
        if not seen:
            return []
        wrong = [f"rank {p} has {count}" for p, count in seen.items() if self._told[p : p + 1] != (count,)]
        if not wrong:  # it was an earlier call
            wrong = [f"rank {p} had {count}" for p, count in seen.items()]
        return [f"tokens={list(self._told)} here, but {', '.join(wrong)}"]
