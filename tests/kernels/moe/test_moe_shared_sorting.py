"""That both operations of a layer may share one sorting of its choices: results, mistakes, dead peers."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from ag_moe_runs import GATHERING as gathering
from collective_runs import ALWAYS
from moe_rs_runs import SCATTERING as scattering
from moe_rs_runs import routed_layers, sorted_rows
from moe_runs import GIVEN_OTHERS, random_choices, randoms
from operation_runs import assert_right, device, message_of, results, values
from operations import HALF
from torch.utils._python_dispatch import TorchDispatchMode

from dist_autotune.kernels.moe.plan import Routing, words_of_shared
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet


@pytest.mark.parametrize(
    ("tokens", "kind", "options"),
    [
        *(((11,), "any", {}), ((0, 9, 30), "any", {}), ((5, 12), "one", {}), ((7, 9), "none", {})),
        ((0, 9, 14), "any", ALWAYS),
    ],
    ids=str,
)
def test_both_operations_of_a_layer_may_share_a_sorting(tokens, kind, options):
    layers = functools.partial(routed_layers, **options)
    assert_right(values(layers, len(tokens), tokens, kind, torch.float32))


@pytest.mark.parametrize(
    "shape",
    [((21, 6), 24, 40, 5, 3), ((7,), 20, 16, 2, 2)],
    ids=["blocks that end within a tile", "odd rows"],
)
def test_sorted_rows_are_loaded_by_tma_where_it_can_address_them(shape):
    by_tma = [index for index, config in enumerate(scattering.candidates) if config.kwargs["TMA"]]
    for errors, legal in values(sorted_rows, len(shape[0]), shape, by_tma):
        assert max(errors) < 1
        assert legal == [shape[1] % 8 == 0, False] * len(by_tma)


class Operators(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_routing_of_other_sizes_reads_nothing_from_the_host():
    """A copy from it would wait for a GPU, and end a capture."""
    words = torch.empty(words_of_shared(2, 4, 16), dtype=torch.int32, device="meta")
    routing = Routing.of_words(words, tokens=(5, 3), topk=2, experts=4)
    with Operators() as called:
        assert routing.sources(8).shape == (16,)
    assert called.names.isdisjoint({"lift_fresh", "_to_copy", "copy_"})


def routed(op, own, tokens):
    """Return the products, by expert, of fresh tokens, and their routing."""
    ids = random_choices(own, 3, 2)
    x, weight = (randoms(*shape, dtype=op._dtype) for shape in ((own, 16), (3, 16, 16)))
    return op.route(x, weight, ids, torch.ones(ids.shape, device=device()), tokens=tokens)


def routes_alone(rank):
    """Route on rank 0 and call on rank 1."""
    gathering.begin(rank)
    op = gathering.open(8, 16, HALF)
    op._patience_ticks = as_patience(5.0)
    call = (lambda: routed(op, 4, [4, 4])) if rank == 0 else (lambda: gathering.fresh_call(op, [4, 4]))
    return message_of(call), message_of(op.close)


def test_a_rank_that_routes_where_another_calls_is_named_on_both():
    for rank, (message, at_close) in enumerate(values(routes_alone, 2)):
        wanted = GIVEN_OTHERS.replace("rank 0", f"rank {1 - rank}")
        assert message.startswith(f"ValueError: AllGatherMoE, rank {rank}: {wanted}")
        assert at_close == message


def dead_peer(rank, of_scatter):
    """Kill rank 1 behind the routing; no later call of rank 0 tells it choices or awaits any."""
    gathering.begin(rank)
    scattering.begin(rank)
    up, down = gathering.open(8, 16, torch.float32), MoEReduceScatter(8, 16, torch.float32)
    hidden, routing = routed(up, 4, [4, 4])
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    op = down if of_scatter else up
    op._patience_ticks = as_patience(1.0)
    x, weight = randoms(4, 16, dtype=torch.float32), randoms(3, 16, 16, dtype=torch.float32)

    def call():
        return down.by_expert(hidden, weight, routing) if of_scatter else up.by_expert(x, weight, routing)

    return message_of(call), message_of(call), message_of(op.close)


@pytest.mark.parametrize("of_scatter", [False, True], ids=["AllGatherMoE", "MoEReduceScatter"])
def test_a_peer_that_dies_behind_the_routing_is_named_and_the_wait_ends(of_scatter):
    survivor, dead = results(dead_peer, 2, of_scatter)
    assert_killed(dead)
    (messages,) = assert_all_ok([survivor])
    name = "MoEReduceScatter" if of_scatter else "AllGatherMoE"
    lost = "its sums for chunk 0" if of_scatter else "its tokens"
    assert messages[0].startswith(
        f"PeerTimeout: {name}, rank 0: rank 1, or one that it waits for, did not push {lost} in time"
    )
    assert set(messages) == {messages[0]}


def mistakes(rank):
    gathering.begin(rank)
    scattering.begin(rank)
    with (
        gathering.open(8, 16, torch.float32) as up,
        MoEReduceScatter(8, 16, torch.float32) as down,
        MoEReduceScatter(3, 16, torch.float32) as small,
    ):
        hidden, routing = routed(up, 4, [4, 4])
        weight = torch.zeros(3, 16, 16)
        texts = [
            message_of(lambda: up.by_expert(torch.zeros(5, 16), weight, routing)),
            message_of(lambda: up.by_expert(torch.zeros(4, 16), torch.zeros(2, 16, 16), routing)),
            message_of(lambda: down.by_expert(hidden[:15], weight, routing)),
            message_of(lambda: down.by_expert(hidden, weight, routing, torch.ones(8, 2))),
            message_of(lambda: down.by_expert(hidden, weight, routing, out=torch.zeros(3, 16))),
            message_of(lambda: down.by_expert(hidden, weight, routing, out=hidden[4:8])),
            message_of(lambda: small.by_expert(hidden, weight, routing)),
        ]
        return texts, bool(down.by_expert(hidden, weight, routing).any())


def test_what_does_not_fit_a_routing_raises_with_values_and_the_operations_stay_usable():
    for texts, is_wrong in values(mistakes, 2):
        wanted = [
            "x_shard [5, 16] and a routing of tokens [4, 4]: rank",
            "weight has 2 experts, the routing is of 3",
            "y has 15 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows",
            "weights are [8, 2] in torch.float32; contiguous [16] in torch.float32 is needed",
            "out has shape [3, 16]",
            "out overlaps y, which the call reads",
            "the routing is of tokens [4, 4]; this operation is open for 2 ranks of up to 3 tokens",
        ]
        for text, part in zip(texts, wanted, strict=True):
            assert text.startswith(f"ValueError: {part}"), text
        assert not is_wrong
