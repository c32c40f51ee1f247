"""That calls over experts are made by collectives on all ranks or on none, right either way.

Under pytest the ranks are CPU processes, whose collectives are gloo's; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ag_moe_runs import GATHERING
from collective_runs import PATIENCE_S, SHORT_S, note_agreements, prefer
from moe_rs_runs import SCATTERING, captured_layer, routed_layers
from moe_runs import (
    GIVEN_OTHERS,
    HALF,
    SHAPES,
    random_choices,
    replays_among_eager_calls,
    three_calls,
)
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    assert_right,
    ends,
    left_as_before,
    message_of,
    results,
    run_cases,
    tuned_in_context,
    values,
)

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER
BOTH = pytest.mark.parametrize("runs", [GATHERING, SCATTERING], ids=lambda runs: runs.name)
ALWAYS = {"collective": True, "timeout_s": PATIENCE_S}

every_call = functools.partial(three_calls, **ALWAYS)


# ---- every call by collectives


@BOTH
@pytest.mark.parametrize(
    "shape",
    [((13, 0, 5), 24, 40, 5, 3), SHAPES["no tokens anywhere"]],
    ids=["ragged, a rank without tokens", "no tokens"],
)
def test_any_shape_is_right(runs, shape):
    assert_right(values(every_call, len(shape[0]), runs, *shape))


@BOTH
def test_one_rank_needs_no_process_group(runs):
    with left_as_before(runs.kernel):
        runs.begin(0)
        with runs.open(20, 16, HALF, backend="shm", collective=True) as op:
            runs.poison(op)
            for tokens, told in (([20], False), ([7], True)):
                assert runs.call_and_compare(op, tokens, 24, 3, 2, told=told) < 1


def test_a_layer_may_share_a_sorting():
    layers = functools.partial(routed_layers, **ALWAYS)
    assert_right(values(layers, 3, (0, 9, 14), "any", torch.float32))


# ---- some calls by collectives


def some_calls(rank, runs, seed, calls=6, backend="auto"):
    """Want them at random on each rank; results are looked at in the end."""
    runs.begin(rank)
    order, own, kept, made = random.Random(seed), random.Random(f"{seed}, {rank}"), [], []
    world, (of_operation, of_call) = dist.get_world_size(), runs.sizes(16, 24)
    with runs.open(20, of_operation, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        prefer(op, lambda: shared or own.random() < 0.5)
        note_agreements(op, made)
        for _ in range(calls):
            shared, told = order.random() < 0.4, order.random() < 0.5
            tokens = [order.choice((20, 7, 0, 16)) for _ in range(world)]
            if order.randrange(world) == rank:
                time.sleep(own.random() / 20)
            operands = runs.operands(op, tokens, of_call, 3, 2)
            kept.append((op(*operands, tokens=tokens if told else None), *operands))
        op.check()
    errors = [0.0 if 0 < sum(made) < calls == len(made) else 9.0]
    return errors + [runs.error_ratio(*one) for one in kept]


@pytest.mark.parametrize(("runs", "world"), [(GATHERING, 3), (SCATTERING, 2)], ids=["gather", "scatter"])
def test_ranks_may_want_it_differently_in_each_call(runs, world):
    assert_right(values(some_calls, world, runs, 2))


def captures(rank):
    """Pretend to capture; on the CPU that runs what a replay would."""
    runs = GATHERING
    runs.begin(rank)
    found, made = [], []
    with runs.open(16, 16, HALF, timeout_s=PATIENCE_S) as op:
        note_agreements(op, made)
        for wanted, captured, tokens, topk in (
            (True, False, [16, 9], 2),
            (False, True, [16, 9], 2),  # as the last eager call
            (False, True, [9, 16], 2),  # of the same size class
            (True, True, [2, 1], 2),  # of which there was no eager call
            (True, True, [16, 9], 3),
            (False, False, [16, 9], 2),
            (True, True, [16, 9], 2),
        ):
            prefer(op, lambda wanted=wanted: wanted)
            op._is_capturing = lambda captured=captured: captured
            error = runs.call_and_compare(op, tokens, 24, 3, topk, told=True)
            found.append((error < 1, made[-1]))
            op._is_capturing = lambda: False
    return found


def test_a_captured_call_does_what_the_last_eager_one_of_its_size_class_did():
    by_collectives = [True, True, True, False, False, False, False]
    assert values(captures, 2) == [[(True, made) for made in by_collectives]] * 2


def tuned(rank, runs):
    runs.begin(rank, 0)
    ways, made = [], []
    of_operation, of_call = runs.sizes(16, 24)
    with runs.open(16, of_operation, HALF, timeout_s=PATIENCE_S) as op:
        note_agreements(op, made)
        step, errors = tuned_in_context(lambda: runs.call_and_compare(op, [16, 9], of_call, 3, 2, told=True))
        step()
        (winner,) = (each.config for each in step.report.contexts if each.kernel.endswith(" way"))
        tried, settled = list(made), made[-1]
        # As many to a power of two, so not tuned again, and outside of the session too.
        errors.append(runs.call_and_compare(op, [15, 12], of_call, 3, 2, told=True))
        ways = [settled, made[-1]]
    return errors, winner, sorted(set(tried)), ways


@BOTH
def test_a_session_tries_it_on_all_ranks_in_the_same_runs_and_the_winner_stands(runs):
    (errors, winner, tried, ways), other = values(tuned, 2, runs)
    assert max(errors + other[0]) < 1
    assert (winner, tried, ways) == other[1:]
    assert tried == [False, True]
    assert ways == [winner == "collective"] * 2


# ---- what goes wrong


def invalid_expert(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16, HALF, **ALWAYS)
    wrong = torch.tensor([[0, 1], [-1, 3], [2, 2], [-2, 0]]) if rank == 1 else None
    return ends(op, lambda: runs.fresh_call(op, [4, 4], ids=wrong))


@BOTH
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(runs):
    for rank, (message, again, at_close) in enumerate(values(invalid_expert, 2, runs)):
        wanted = f"ValueError: {runs.name}, rank {rank}: rank 1 chose expert 3, which weight does not have"
        assert message.startswith(wanted)
        assert again
        assert at_close


def wrong_tokens(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16, HALF, **ALWAYS)
    ids = random_choices((4, 6)[rank], 3, 2)
    return message_of(lambda: runs.fresh_call(op, (4, 5) if rank == 0 else (4, 6), ids=ids))


@BOTH
def test_wrong_tokens_are_reported_by_name_on_every_rank(runs):
    zero, one = values(wrong_tokens, 2, runs)
    assert zero.startswith(f"ValueError: {runs.name}, rank 0: tokens=[4, 5] here, but rank 1 has 6. Close it")
    assert one.startswith(f"ValueError: {runs.name}, rank 1: {GIVEN_OTHERS}")


def peer_that_does_not_come(rank, how):
    """Leave rank 0 alone in the second call: rank 1 dies, or fails behind its ballot."""
    found = []
    for runs in (GATHERING, SCATTERING):
        runs.begin(rank)
        op = runs.open(8, 16, HALF, collective=True, timeout_s=SHORT_S)
        runs.fresh_call(op, [4, 3])
        found.append((op, functools.partial(runs.fresh_call, op, [4, 3])))
    meet()
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        for op, _ in found:
            op._collective._make = None
    messages = [(message_of(call), message_of(op.close)) for op, call in found]
    if how != "dies":
        meet()
    return messages


@pytest.mark.parametrize("how", ["dies", "fails behind its ballot"])
def test_a_peer_that_does_not_come_is_named_and_the_wait_ends(how):
    waiting, other = results(peer_that_does_not_come, 2, how)
    if how == "dies":
        assert_killed(other)
        other = waiting
    of_both, _ = assert_all_ok([waiting, other])
    for (first, at_close), name in zip(of_both, ("AllGatherMoE", "MoEReduceScatter"), strict=True):
        text = f"{name}: all ranks agreed on a collective, and one did not take part"
        assert first.startswith(f"PeerTimeout: {text}")
        assert at_close.startswith(f"RuntimeError: {name}, rank 0: call 2 was not carried out: PeerTimeout")


def opened_differently(rank):
    given = {"collective": (True, None)[rank]}
    return [
        message_of(functools.partial(kind, 8, 16, HALF, **given)) for kind in (AllGatherMoE, MoEReduceScatter)
    ]


def test_ranks_that_fix_it_differently_are_told_so_when_they_open():
    text = "ValueError: the ranks pass different values of collective: rank 0: 'True'; rank 1: 'None'."
    for messages in values(opened_differently, 2):
        assert [message[: len(text)] for message in messages] == [text] * 2


# ---- on GPUs


def cases_on_gpus(rank, runs, backend):
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
    return run_cases(cases)


def cases_on_one_gpu(rank):
    errors = []
    for runs in (GATHERING, SCATTERING):
        errors += every_call(rank, runs, (300,), 264, 520, 8, 2, torch.bfloat16)
    return errors + routed_layers(rank, [300], "any", **ALWAYS) + captured_layer(rank, [300], **ALWAYS)


@pytest.mark.gpu(devices=1)
def test_what_stands_between_the_collectives_is_right_on_one_gpu():
    assert_right(values(cases_on_one_gpu, 1))


@pytest.mark.gpu(devices=2, seconds=40)
@BOTH
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_all_of_the_above_is_so_on_gpus(runs, backend):
    assert values(cases_on_gpus, 2, runs, backend, timeout_s=300) == [[], []]
