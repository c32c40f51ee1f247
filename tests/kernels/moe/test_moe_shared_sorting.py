"""That both operations of a layer may share one sorting of its choices: results, mistakes, dead peers."""

import pytest
import torch
from expert_runs import GATHERING as gathering
from expert_runs import GIVEN_OTHERS, STORING_CHOSEN, random_choices, randoms, routed_layers, sorted_rows
from expert_runs import SCATTERING as scattering
from operation_runs import device, die, end_of, message_of, on_ranks
from operations import ALWAYS, HALF

from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience
from ranks import meet


@pytest.mark.parametrize(
    ("world", "tokens", "kind", "options"),
    [
        *(
            (1, (11,), "any", {}),
            (3, (0, 9, 30), "any", {}),
            (2, (5, 12), "one", {}),
            (2, (7, 9), "none", {}),
        ),
        (3, (0, 9, 14), "any", ALWAYS),
        (3, (0, 9, 30), "any", {"scattering": STORING_CHOSEN}),
        (4, (8, 5, 17, 3), "any", {"scattering": STORING_CHOSEN}),
    ],
    ids=lambda value: "by stores" if "scattering" in str(value) else str(value),
)
@on_ranks()
def test_both_operations_of_a_layer_may_share_a_sorting(rank, world, tokens, kind, options):
    return routed_layers(rank, tokens, kind, torch.float32, **options)


@pytest.mark.parametrize(
    ("world", "shape"),
    [(2, ((21, 6), 24, 40, 5, 3)), (1, ((7,), 20, 16, 2, 2))],
    ids=["blocks that end within a tile", "odd rows"],
)
@on_ranks()
def test_sorted_rows_are_loaded_by_tma_where_it_can_address_them(rank, world, shape):
    by_tma = [index for index, config in enumerate(scattering.candidates) if config.kwargs["TMA"]]
    errors, legal = sorted_rows(rank, shape, by_tma)
    assert legal == [shape[1] % 8 == 0, False] * len(by_tma)
    return errors


def routed(op, own, tokens):
    """Return the products, by expert, of fresh tokens, and their routing."""
    ids = random_choices(own, 3, 2)
    x, weight = (randoms(*shape, dtype=op._dtype) for shape in ((own, 16), (3, 16, 16)))
    return op.route(x, weight, ids, torch.ones(ids.shape, device=device()), tokens=tokens)


@on_ranks(2)
def test_a_rank_that_routes_where_another_calls_is_named_on_both(rank):
    gathering.begin(rank)
    op = gathering.open(8, 16, HALF)
    op._patience_ticks = as_patience(5.0)
    call = (lambda: routed(op, 4, [4, 4])) if rank == 0 else (lambda: gathering.fresh_call(op, [4, 4]))
    message, wanted = message_of(call), GIVEN_OTHERS.replace("rank 0", f"rank {1 - rank}")
    assert message.startswith(f"ValueError: AllGatherMoE, rank {rank}: {wanted}")
    assert message_of(op.close) == message


@pytest.mark.parametrize("scatters", [None, scattering, STORING_CHOSEN], ids=["gather", "scatter", "stores"])
@on_ranks(2, the_last_is_killed=True)
def test_a_peer_that_dies_behind_the_routing_is_named_and_the_wait_ends(rank, scatters):
    """Kill rank 1 behind the routing; no later call of rank 0 tells it choices or awaits any."""
    gathering.begin(rank)
    scattering.begin(rank)
    up, down = gathering.open(8, 16, torch.float32), (scatters or scattering).open(8, 16, torch.float32)
    hidden, routing = routed(up, 4, [4, 4])
    meet()
    if rank == 1:
        die()
    op, name, lost = up, "AllGatherMoE", "its tokens"
    if scatters:
        op, name, lost = down, "MoEReduceScatter", "its sums for chunk 0"
    op._patience_ticks = as_patience(1.0)
    x, weight = randoms(4, 16, dtype=torch.float32), randoms(3, 16, 16, dtype=torch.float32)
    message = end_of(op, lambda: op.by_expert(hidden if scatters else x, weight, routing))
    told = f"rank 0: rank 1, or one that it waits for, did not push {lost} in time"
    assert message.startswith(f"PeerTimeout: {name}, {told}")


@on_ranks(2)
def test_what_does_not_fit_a_routing_raises_with_values_and_the_operations_stay_usable(rank):
    gathering.begin(rank)
    scattering.begin(rank)
    with (
        gathering.open(8, 16, torch.float32) as up,
        MoEReduceScatter(8, 16, torch.float32) as down,
        MoEReduceScatter(3, 16, torch.float32) as small,
    ):
        hidden, routing = routed(up, 4, [4, 4])
        weight, zeros = torch.zeros(3, 16, 16), torch.zeros
        for call, told in (
            (
                lambda: up.by_expert(zeros(5, 16), weight, routing),
                "x_shard [5, 16] and a routing of tokens [4, 4]: rank",
            ),
            (
                lambda: up.by_expert(zeros(4, 16), zeros(2, 16, 16), routing),
                "weight has 2 experts, the routing is of 3",
            ),
            (
                lambda: down.by_expert(hidden[:15], weight, routing),
                "y has 15 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows",
            ),
            (
                lambda: down.by_expert(hidden, weight, routing, torch.ones(8, 2)),
                "weights are [8, 2] in torch.float32; contiguous [16] in torch.float32 is needed",
            ),
            (lambda: down.by_expert(hidden, weight, routing, out=zeros(3, 16)), "out has shape [3, 16]"),
            (
                lambda: down.by_expert(hidden, weight, routing, out=hidden[4:8]),
                "out overlaps y, which the call reads",
            ),
            (
                lambda: small.by_expert(hidden, weight, routing),
                "the routing is of tokens [4, 4]; this operation is open for 2 ranks of up to 3 tokens",
            ),
        ):
            assert message_of(call).startswith(f"ValueError: {told}")
        assert not down.by_expert(hidden, weight, routing).any()
