"""Operators with gradients, each defined once for eager calls and for traced ones.

A traced call is one node of a graph, of `torch.ops.dist_autotune`. An eager call is the bare computation or,
where a gradient is wanted, a function of autograd with the same backward: with gradients the dispatch of an
operator takes a core 36 us, this 8 (torch 2.13, 2026-11-28).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._library.effects import EffectType

LIBRARY = torch.library.Library("dist_autotune", "FRAGMENT")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
INDUCTOR = "torch._inductor.lowering"  # loading it takes seconds: who compiles with it has


class Operator:
    """`operator(*arguments)` returns what `compute` does, whose name and annotations give the schema.

    shapes: the results of fake tensors. keep(context, arguments, results) saves what backward needs.
    gradients(context, needed, *of_results) returns the gradients of the arguments, but for the last ones that
    are no tensors; needed: for which, in lists where the tensors are. meets_peers: ranks that call it wait
    for all others.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        shapes: Callable[..., Any],
        gradients: Callable[..., tuple[Any, ...]] | None = None,
        keep: Callable[..., None] | None = None,
        *,
        meets_peers: bool = True,
    ) -> None:
        name = compute.__name__.lstrip("_")
        LIBRARY.define(name + torch.library.infer_schema(compute, mutates_args=()))
        LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        self.registered = getattr(torch.ops.dist_autotune, name)
        self.compute, self.gradients, self.keep = compute, gradients, keep
        if meets_peers:
            shapes = _keep_in_order(name, shapes)
        name = f"dist_autotune::{name}"
        torch.library.register_fake(name, shapes, lib=LIBRARY)
        if gradients is not None:
            torch.library.register_autograd(
                name,
                lambda ctx, *grads: self.backward(ctx, ctx.needs_input_grad, grads),
                setup_context=keep,
                lib=LIBRARY,
            )

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.registered(*arguments)
        flat, form = _flattened(arguments)
        tensors = [each for each in flat if isinstance(each, Tensor)]
        if torch._C._len_torch_dispatch_stack() > 0 or not _PLAIN.issuperset(map(type, tensors)):
            return self.registered(*arguments)  # a dispatch mode or a subclass of tensors looks on
        if self.gradients is None or not wants_gradient(tensors):
            return self.compute(*arguments)
        call = _Call(self, arguments, form)
        results = _apply(_Differentiable, call, *flat)
        call.arguments = ()
        return results[0] if call.of_results is None else _nested(results, call.of_results)

    def backward(self, ctx: Any, needed: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a gradient, or None, for each argument that was passed."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "these products have no second derivative: call backward without create_graph=True"
            )
        assert self.gradients is not None
        found = self.gradients(ctx, needed, *grads)
        return *found, *(None for _ in needed[len(found) :])


def wants_gradient(tensors: Sequence[Tensor]) -> bool:
    """Return whether autograd records what is done with the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # no generator: microseconds in each call
            if tensor.requires_grad:
                return True
    return False


Form: TypeAlias = list[int | None]  # the lengths of lists among arguments, or among results


class _Call:
    """An eager call that autograd records."""

    def __init__(self, operator: Operator, arguments: tuple[Any, ...], form: Form) -> None:
        self.operator, self.arguments, self.of_arguments = operator, arguments, form
        self.of_results: Form | None = None  # there is a single one


class _Differentiable(torch.autograd.Function):
    """Autograd looks into no list: it is given what lists hold."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Any) -> tuple[Tensor, ...]:
        operator, arguments = call.operator, call.arguments
        results = operator.compute(*arguments)
        assert operator.keep is not None
        operator.keep(ctx, arguments, results)
        ctx.call = call
        if isinstance(results, Tensor):
            return (results,)
        flat, call.of_results = _flattened(results)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        needed = _nested(ctx.needs_input_grad[1:], call.of_arguments)
        of_results = grads if call.of_results is None else _nested(grads, call.of_results)
        return None, *_flattened(call.operator.backward(ctx, needed, of_results))[0]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`; beside torch.func alone it need look at each argument."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # made in C


def _flattened(values: Iterable[Any]) -> tuple[list[Any], Form]:
    flat: list[Any] = []
    form: Form = []
    for each in values:
        if type(each) is list:
            flat += each
            form.append(len(each))
        else:
            flat.append(each)
            form.append(None)
    return flat, form


def _nested(flat: Sequence[Any], form: Form) -> tuple[Any, ...]:
    left = iter(flat)
    return tuple([next(left) if length is None else [next(left) for _ in range(length)] for length in form])


# ---- the order of calls in compiled graphs

# Compilers move calls that do not need each other, by sizes that may differ between ranks: then ranks would
# wait for each other in different calls. An effect orders the calls of a graph, forward and backward.
# Inductor drops that order when it lowers them (torch 2.13: it files it under a buffer's name and looks for
# an operation's), so each call is lowered here, after the call before it.


def _keep_in_order(name: str, shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Order the operator's calls, also those whose result nobody reads; return `shapes`, to be registered."""
    packet = getattr(torch.ops.dist_autotune, name)
    LIBRARY._register_effectful_op(f"dist_autotune::{name}", EffectType.ORDERED)
    for operator in (packet, packet.default):
        torch.fx.node.has_side_effect(operator)

    def traced(*arguments: Any, **options: Any) -> Any:
        inductor = sys.modules.get(INDUCTOR)
        if inductor is not None and packet.default not in inductor.lowerings:
            inductor.lowerings[packet.default] = _in_order(inductor, packet.default)
        return shapes(*arguments, **options)

    return traced


def _in_order(inductor: Any, operator: Any) -> Callable[..., Any]:
    """Return a lowering of the operator that comes after all that went this way in the graph."""
    lower = inductor.fallback_handler(operator, add_to_fallback_set=False)

    def lower_behind(*arguments: Any, **options: Any) -> Any:
        graph = inductor.V.graph
        begin, before = len(graph.operations), graph.effectful_ops.get(INDUCTOR)
        result = lower(*arguments, **options)
        call = graph.operations[begin]
        if before is not None:
            graph.additional_star_deps[call.get_operation_name()].add(before.get_name())
        graph.effectful_ops[INDUCTOR] = call
        return result

    return lower_behind
