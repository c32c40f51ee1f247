"""Keeps calls that meet peers in their order in compiled graphs.

Compilers move calls that do not need each other, by sizes that may differ between ranks: then ranks would
wait for each other in different calls. An effect orders the calls of a graph, forward and backward. Inductor
drops that order when it lowers them (torch 2.13: it files it under a buffer's name and looks for an
operation's), so each call is lowered here, behind the call before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._library.effects import EffectType

INDUCTOR = "torch._inductor.lowering"  # loading it takes seconds: who compiles with it has


def keep_in_order(
    library: torch.library.Library, name: str, shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Order the operator's calls, also those whose result nobody reads; return `shapes`, to be registered."""
    packet = getattr(torch.ops.dist_autotune, name)
    library._register_effectful_op(f"dist_autotune::{name}", EffectType.ORDERED)
    for operator in (packet, packet.default):
        torch.fx.node.has_side_effect(operator)

    def traced(*arguments: Any, **options: Any) -> Any:
        inductor = sys.modules.get(INDUCTOR)
        if inductor is not None and packet.default not in inductor.lowerings:
            inductor.lowerings[packet.default] = _in_order(inductor, packet.default)
        return shapes(*arguments, **options)

    return traced


def _in_order(inductor: Any, operator: Any) -> Callable[..., Any]:
    """Return a lowering of the operator that comes behind all that went this way in the graph."""
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
