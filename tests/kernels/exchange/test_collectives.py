"""That calls are made by collectives on all ranks or on none, right either way, and what is told of failures.

Under pytest the ranks are CPU processes, whose collectives are gloo's; tests marked `gpu` repeat on GPUs.
"""

import functools
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_runs import SCATTERING_SUMS, begin
from every_operation import WITH_COLLECTIVES, each
from expert_runs import SCATTERING, captured_layer, routed_layers
from operation_runs import GPU_BACKENDS, die, message_of, on_ranks, results, tuned_in_context, values
from operations import (
    ALWAYS,
    HALF,
    PATIENCE_S,
    SHAPES,
    SHORT_S,
    in_a_subset,
    in_odd_places,
    replays_among_eager_calls,
    three_calls,
)

from dist_autotune import contextual_autotune
from dist_autotune.codec import digest
from dist_autotune.kernels.agreement.ballots import NUMBERS, RING, Ballots
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.launch.tunable import CHOICES
from dist_autotune.triton_api.identity import key_text
from ranks import assert_all_ok, assert_killed, meet


def prefer(op, choose):
    """Have this rank want a collective where `choose()` says so, whatever its peers want."""
    op._collective.vote = lambda rows, key: int(choose())


def note_agreements(op, made):
    """Append what the ranks agree on in each call."""
    agree = op._collective.agree

    def noted(*args, **given):
        made.append(agree(*args, **given))
        return made[-1]

    op._collective.agree = noted


# ---- every call by collectives


@each(WITH_COLLECTIVES)
@on_ranks(3)
def test_every_call_is_right(rank, runs):
    shapes = {
        "ragged, a rank without tokens": ((13, 0, 5), 24, 40, 5, 3, HALF),
        "no tokens": ((0, 0, 0), 16, 16, 3, 2, torch.float32),
        "bfloat16": ((5, 9, 2), 16, 33, 3, 2, torch.bfloat16),
    }
    cases = {
        name: lambda shape=shape: three_calls(rank, runs, *shape, **ALWAYS) for name, shape in shapes.items()
    }
    cases["odd places"] = lambda: in_odd_places(rank, runs, **ALWAYS)
    cases["a subset"] = lambda: in_a_subset(rank, runs, **ALWAYS)
    return cases


# ---- some calls by collectives


def some_calls(rank, runs, seed, calls=10, backend="auto"):
    """Want them at random on each rank, mixed with captured calls' lane; results are looked at in the end."""
    order, own, kept, made = random.Random(seed), random.Random(f"{seed}, {rank}"), [], []
    world, (of_operation, _) = dist.get_world_size(), runs.sizes(16, 24)
    mixes_lanes = runs.name == "AllGatherGemm"
    with runs.opened(rank, 24, of_operation, backend=backend, timeout_s=PATIENCE_S) as op:
        prefer(op, lambda: shared or own.random() < 0.5)
        note_agreements(op, made)
        for _ in range(calls):
            shared, told, captured = (order.random() < chance for chance in (0.4, 0.5, 0.5 * mixes_lanes))
            rows = [order.choice((24, 7, 0, 16)) for _ in range(world)]
            in_place = runs.can_be_in_place and own.random() < 0.5
            if order.randrange(world) == rank:
                time.sleep(own.random() / 20)
            operands = runs.operands(op, rows, own.choice((16, 24, 33)))
            out = runs.new_out(op, rows, operands)
            given = runs.given(op, operands, told=told, in_place=in_place)
            if captured:
                runs.call_as_captured(op, given, out, rows)
            else:
                runs.call(op, given, out, rows, told=told)
            kept.append((out, *operands))
        op.check()
    errors = [0.0 if 0 < sum(made) < calls == len(made) else 9.0]
    return errors + [runs.error_ratio(*one) for one in kept]


WORLDS = {"AllGatherGemm": 2, "GemmReduceScatter": 3, "AllGatherMoE": 3, "MoEReduceScatter": 2}


@pytest.mark.parametrize(("name", "world"), WORLDS.items(), ids=WORLDS)
@on_ranks()
def test_ranks_may_want_it_differently_in_each_call(rank, name, world):
    return some_calls(rank, WITH_COLLECTIVES[name], 2)


CAPTURES = {  # whether this rank wants it, is capturing, rows of each rank and choices a token; what is done
    "AllGatherGemm": [
        ((True, False, [16, 16], 2), True),
        ((False, True, [16, 16], 2), True),  # as the last eager call
        ((True, True, [8, 8], 2), False),  # of which there was no eager call
        ((False, False, [16, 16], 2), False),
        ((True, True, [16, 16], 2), False),
        ((True, False, [9, 9], 2), True),
        ((True, True, [9, 9], 2), True),
    ],
    "AllGatherMoE": [
        ((True, False, [16, 9], 2), True),
        ((False, True, [16, 9], 2), True),
        ((False, True, [9, 16], 2), True),  # of the same size class
        ((True, True, [2, 1], 2), False),
        ((True, True, [16, 9], 3), False),
        ((False, False, [16, 9], 2), False),
        ((True, True, [16, 9], 2), False),
    ],
}


@each({name: WITH_COLLECTIVES[name] for name in CAPTURES})
@on_ranks(2)
def test_a_captured_call_does_what_the_last_eager_one_of_as_many_rows_or_their_class_did(rank, runs):
    """Pretend to capture; on the CPU that runs what a replay would."""
    made = []
    with runs.opened(rank, 16, 16, timeout_s=PATIENCE_S) as op:
        note_agreements(op, made)
        for (wanted, captured, rows, topk), done in CAPTURES[runs.name]:
            prefer(op, lambda wanted=wanted: wanted)
            op._is_capturing = lambda captured=captured: captured
            assert runs.call_and_compare(op, rows, 24, 3, topk, told=True) < 1
            assert made[-1] == done
            op._is_capturing = lambda: False


# ---- who decides


def tuned(rank, runs):
    """Tune with a size of each rank's own, then call outside of the session."""
    made, rows, (of_operation, _) = [], [16, 9], runs.sizes(16, 24)
    with runs.opened(rank, 16, of_operation, candidate=0, timeout_s=PATIENCE_S) as op:
        note_agreements(op, made)
        size = 24 + 16 * rank
        step, errors = tuned_in_context(lambda: runs.call_and_compare(op, rows, size, told=True))
        step()
        (winner,) = (found.config for found in step.report.contexts if found.kernel.endswith(" way"))
        tried, settled = sorted(set(made)), made[-1]
        # As many to a power of two, so not tuned again, and outside of the session too.
        errors.append(runs.call_and_compare(op, [16, 12], size, told=True))
    return errors, winner, tried, [settled, made[-1]]


@each(WITH_COLLECTIVES)
def test_a_session_tries_it_on_all_ranks_in_the_same_runs_and_the_winner_stands(runs):
    (errors, winner, tried, ways), other = values(tuned, 2, runs)
    assert max(errors + other[0]) < 1
    assert (winner, tried, ways) == other[1:]
    assert tried == [False, True]
    assert ways == [winner == "collective"] * 2


@pytest.mark.filterwarnings("ignore:.*is tuned without is_dist=True")
@on_ranks(2)
def test_where_one_rank_tunes_or_knows_a_result_alone_nobody_makes_it(rank):
    begin(rank, 0)
    with GemmReduceScatter(32, 24, HALF, timeout_s=PATIENCE_S) as op:
        op._launch = mock.Mock(wraps=op._launch)

        def step():
            return SCATTERING_SUMS.call_and_compare(op, [16], 16)

        alone = contextual_autotune(mode="online", cache=False, log_dir=None)(step) if rank == 0 else step
        errors = [alone() for _ in range(30)]
        if rank == 0:
            name, key = op._collective._choice, (32, 2, *op._key)
            CHOICES.remember(name, key_text(key), digest('"collective"'), (0, 1))
            assert op._collective.vote(32, op._key)
        errors += [step() for _ in range(3)]
        assert op._launch.call_count == 33
    return errors


# ---- what goes wrong


@on_ranks(2)
def test_a_group_that_cannot_make_it_is_refused_where_it_is_fixed(rank):
    dist.get_backend_config = lambda group: "cuda:nccl,xcpu:gloo"
    told = "ValueError: collective=True needs a backend on cpu; the group has cuda:nccl,xcpu:gloo"
    assert message_of(lambda: GemmReduceScatter(8, 16, HALF, collective=True, timeout_s=PATIENCE_S)) == told
    with GemmReduceScatter(8, 16, HALF, timeout_s=PATIENCE_S) as op:
        assert not op._collective.vote(8, ())
        return [SCATTERING_SUMS.call_and_compare(op, [4], 16)]


def peer_that_does_not_come(rank, how):
    """Leave rank 0 alone in the second calls: rank 1 makes none, dies, or fails behind its ballots."""
    found = []
    for runs in WITH_COLLECTIVES.values():
        runs.begin(rank)
        op = runs.open(8, 16, collective=True, timeout_s=SHORT_S)
        runs.fresh_call(op, [4, 4])
        found.append((op, functools.partial(runs.fresh_call, op, [4, 4])))
    meet()
    if rank == 1 and how == "dies":
        die()
    if rank == 1:
        for op, _ in found:
            op._collective._make = None
    comes = rank == 0 or how != "makes none"
    messages = [(message_of(call), message_of(op.close)) for op, call in found] if comes else []
    if how != "dies":
        meet()
    return messages


@pytest.mark.parametrize("how", ["makes none", "dies", "fails behind its ballot"])
def test_a_peer_that_does_not_come_is_named_and_the_wait_ends(how):
    waiting, other = results(peer_that_does_not_come, 2, how)
    if how == "dies":
        assert_killed(other)
        other = waiting
    of_all, _ = assert_all_ok([waiting, other])
    for (first, at_close), name in zip(of_all, WITH_COLLECTIVES, strict=True):
        told = f"PeerTimeout: {name}: all ranks agreed on a collective, and one did not take part"
        if how == "fails behind its ballot":  # and cannot even make it without its data
            told = f"RuntimeError: {name}, rank 0: call 2 failed on rank 1: TypeError"
        assert first.startswith(told)
        assert at_close.startswith(f"RuntimeError: {name}, rank 0: ")
        assert at_close == first or "was not carried out: PeerTimeout" in at_close


# ---- on GPUs


@each(WITH_COLLECTIVES)
@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@on_ranks(2, timeout_s=300)
def test_all_of_the_above_is_so_on_gpus(rank, runs, backend):
    options = {"backend": backend, **ALWAYS}
    cases = {
        name: lambda shape=shape: three_calls(rank, runs, *shape, torch.bfloat16, **options)
        for name, shape in SHAPES.items()
    }
    cases["some calls"] = lambda: some_calls(rank, runs, 5, 40, backend)
    cases["replays"] = lambda: replays_among_eager_calls(rank, runs, backend, collective=True)
    cases["a session"] = lambda: tuned(rank, runs)[0]
    if runs is SCATTERING:
        cases["a layer"] = lambda: routed_layers(rank, [700, 333], "any", **options)
        cases["a layer, captured"] = lambda: captured_layer(rank, [700, 333], **options)
    return cases


@pytest.mark.gpu(devices=1)
@on_ranks(1)
def test_what_stands_between_the_collectives_is_right_on_one_gpu(rank):
    errors = []
    for runs in WITH_COLLECTIVES.values():
        errors += three_calls(rank, runs, (300,), 264, 520, 8, 2, torch.bfloat16, **ALWAYS)
    return errors + routed_layers(rank, [300], "any", **ALWAYS) + captured_layer(rank, [300], **ALWAYS)


# ---- hosts that must decide alike, however far one is ahead


@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, NUMBERS - RING)])
@on_ranks()
def test_all_ranks_decide_alike_around_the_ring_and_where_numbers_begin_anew(rank, world, first):
    box, order, late = Ballots("test", None, PATIENCE_S), random.Random(first), random.Random(rank)
    box._call, box._rings[rank][first % RING] = first, first << 32
    dist.barrier()
    wrong = []
    for call in range(3 * RING):
        asked = [order.choice((0, 8, 8)) for _ in range(world)]
        if order.random() < 0.7:
            asked = [8 * (asked[0] > 0)] * len(asked)
        if late.random() < 0.01:
            time.sleep(late.random() / 100)
        standing = box.standing(8)
        if box.agree(8, int(asked[rank] > 0), 8) != (set(asked) == {8} or (standing and 8 in asked)):
            wrong.append(call)
    box.check()
    assert wrong == []
