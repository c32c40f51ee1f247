"""What an exchange costs: bytes grow with contexts, never with ranks; a thousand ranks merge in a tree."""

import functools
import os
import random
import statistics
import sys
import time

import pytest
import torch.distributed as dist

from dist_autotune.hub import Exchanges, bytes_of, children, pack, text_of
from dist_autotune.payload import Announcement, Part, Payload, merge
from kernels_for_tests import Bench, launch, numbers, records
from rank_programs import tune
from ranks import assert_all_ok, run_ranks

RANKS = 1024


def said(capsys, text):
    with capsys.disabled():
        sys.stdout.write(f"\n  {text}")


def simulated(rank, contexts, first=False):
    """Return what a rank says of a run: times, now and then a ban, and who it is when it is new."""
    generator = random.Random(rank)
    parts = {}
    for n in range(contexts):
        ms = generator.randrange(1, 1 << 20) / 1024  # sums of these are exact in any order
        order = tuple((f"{candidate:016x}", f"BLOCK: {candidate}") for candidate in range(8))
        shared = tuple(digest for digest, _ in order)
        announcement = Announcement(rank, "matmul", f"{n}, 'torch.float16'", order, shared) if first else None
        bans = (
            {f"{rank % 3:016x}": (rank, "out of resource: shared memory")}
            if generator.random() < 0.01
            else {}
        )
        parts[f"{n:016x}"] = Part("0" * 16, ms, ms, ms, 1, bans=bans, announcement=announcement)
    return Payload("run", rank, {"the tuned function": {"step": rank}}, parts=parts, elapsed_s=rank / 1024)


@functools.cache
def payloads(contexts, first):
    return tuple(simulated(rank, contexts, first).encode() for rank in range(RANKS))


def merged_in_a_tree(sent, fan_out, position=0):
    below = [merged_in_a_tree(sent, fan_out, child) for child in children(position, fan_out, len(sent))]
    return merge(sent[position], *below)


@pytest.mark.parametrize("first", [False, True], ids=["any run", "first run"])
@pytest.mark.parametrize("fan_out", [2, 32])
def test_a_tree_of_1024_ranks_gives_the_same_as_one_after_another(fan_out, first, capsys):
    sent = payloads(4, first)
    began = time.perf_counter()
    tree = merged_in_a_tree(sent, fan_out)
    tree_ms = (time.perf_counter() - began) * 1e3
    flat = functools.reduce(merge, random.Random(1).sample(sent, RANKS))
    assert Payload.decode(tree) == Payload.decode(flat)
    nodes = sum(1 for position in range(RANKS) if children(position, fan_out, RANKS))
    said(
        capsys,
        f"{RANKS} ranks, 4 contexts, fan-out {fan_out}: {tree_ms / nodes:.2f} ms of merging per inner rank",
    )


@pytest.mark.parametrize("first", [False, True], ids=["any run", "first run"])
def test_the_merged_payload_is_as_large_as_that_of_one_rank(first):
    sent = payloads(4, first)
    merged = merge(*sent)
    # Ranks and counts have more digits, and a ban appears when any of the ranks has one.
    assert len(merged) < 1.5 * len(sent[0]) + 4 * 3 * 80
    assert len(merge(*payloads(8, first))) < 2.2 * len(merged)


def test_messages_of_real_ranks_do_not_grow_with_their_number():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 1.5, 64: 2.0})
        logs = f"logs-{dist.get_world_size()}"
        tune(bench, lambda: launch(kernel, x), log_dir=logs)()
        return [
            (e.sent_bytes, e.received_bytes)
            for e in records(directory=logs, rank=rank)
            if e.event == "exchanged"
        ]

    of_two = assert_all_ok(run_ranks(program, 2))
    of_eight = assert_all_ok(run_ranks(program, 8))
    assert {len(exchanged) for exchanged in (*of_two, *of_eight)} == {5}  # the opening and four runs
    for exchanged in of_eight:
        for (sent, received), (sent_of_two, received_of_two) in zip(exchanged, of_two[0], strict=True):
            assert sent <= sent_of_two + 64
            assert received <= received_of_two + 64


@pytest.mark.parametrize("world_size", [2, 8])
def test_time_of_the_vote_after_a_settled_call(world_size, capsys):
    def program(rank):
        def us_a_call(**options):
            bench, x = Bench(), numbers()
            kernel = bench.kernel({16: 1.0, 32: 2.0})
            step = tune(bench, lambda: launch(kernel, x), log_dir=None, **options)
            for _ in range(20):
                step()
            times_us = []
            for _ in range(100):
                began = time.perf_counter()
                step()
                times_us.append((time.perf_counter() - began) * 1e6)
            return statistics.median(times_us)

        return us_a_call(), us_a_call(watch=False)

    voting_us, quiet_us = max(assert_all_ok(run_ranks(program, world_size)))
    where = f"{world_size} ranks, {os.cpu_count()} cores"
    said(capsys, f"a settled call on {where}: {quiet_us:.0f} us, the vote adds {voting_us - quiet_us:.0f}")
    assert voting_us < 50e3


def test_256_ranks_through_one_hub(capsys):
    """The hub's own work for an exchange, and what passes it in bytes; the network is left out."""
    size, fan_out, times_ms = 256, 32, []
    exchanges = Exchanges(size, fan_out)
    sent = payloads(4, False)[:size]
    traffic = {position: [0, 0] for position in range(size)}  # bytes out and in

    for sequence in range(3):
        replies = {position: [] for position in range(size)}

        def tell(position, op, sequence=sequence, replies=replies, **fields):
            message = {"op": op, "id": 0, "sequence": sequence, "position": position, **fields}
            traffic[position][0] += len(pack(message))
            exchanges.handle(message, replies[position].append)

        began = time.perf_counter()
        for position in reversed(range(size)):  # children before their parents
            payload = sent[position]
            if children(position, fan_out, size):
                tell(position, "collect")
                payload = merge(payload, *map(bytes_of, replies[position][-1]["payloads"]))
            if position:
                tell(position, "post", payload=text_of(payload))
            else:
                tell(0, "publish", end={"merged": text_of(payload)})
        times_ms.append((time.perf_counter() - began) * 1e3)
        for position, told in replies.items():
            assert Payload.decode(bytes_of(told[-1]["end"]["merged"])).rank == 0
            traffic[position][1] += sum(len(pack(message)) for message in told)

    assert len(exchanges) == 0
    leaf, root = traffic[size - 1], traffic[0]
    out, into = leaf[0] // 3, leaf[1] // 3
    said(
        capsys,
        f"{size} ranks, 4 contexts: {statistics.median(times_ms):.0f} ms for all the work of an exchange; "
        f"bytes out and in: a leaf {out} and {into}, the root {root[0] // 3} and {root[1] // 3}",
    )
    assert leaf[0] < 3 * 2000
    assert root[1] < 3 * 2000 * (fan_out + 1)
