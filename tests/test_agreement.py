"""The exchange between ranks, without anything to tune: how every rank of it ends."""

import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dist_autotune import AgreementTimeout, NoValidConfig, PeerFailed, attendant, peers
from dist_autotune import exchange as exchange_module
from dist_autotune.agreement import AGREEMENTS
from dist_autotune.payload import Part, Payload, merge
from rank_programs import (
    IN_TIME_S,
    SHORT_S,
    SOON_S,
    TIMEOUT_S,
    ending,
    interrupt_when_waiting,
    is_gone,
    listen,
    wait_for,
)
from ranks import assert_all_ok, assert_killed, describe, meet, run_ranks


def join(*payloads: bytes) -> bytes:
    """Merge payloads so that what arrived, and how often, can be told afterwards."""
    return b" ".join(payloads)


def exchange(payload: object, timeout_s: float = TIMEOUT_S, group: object = None) -> list[int]:
    """Return the numbers that the ranks sent, sorted: a tree merges in an order of its own."""
    merged = AGREEMENTS.of(group).exchange(str(payload).encode(), join, timeout_s, "a test")
    return sorted(map(int, merged.split()))


# ---- everybody comes


@pytest.mark.parametrize("init", ["file", "tcp"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_every_payload_once(init, world_size):
    def program(rank):
        return [exchange(rank + 10 * n) for n in range(20)]

    expected = [[rank + 10 * n for rank in range(world_size)] for n in range(20)]
    assert assert_all_ok(run_ranks(program, world_size, init=init)) == [expected] * world_size


@pytest.mark.parametrize("late", [0, 1, 3, 6], ids="late rank {}".format)
def test_a_tree_of_three_levels_gives_the_same_as_a_flat_one(monkeypatch, late):
    monkeypatch.setattr(peers, "FAN_OUT", 2)

    def program(rank):
        first = exchange(rank)
        if rank == late:
            time.sleep(0.05)
        return first, exchange(rank * rank)

    expected = (list(range(7)), [rank * rank for rank in range(7)])
    assert assert_all_ok(run_ranks(program, 7)) == [expected] * 7


def test_payloads_of_any_bytes_and_of_a_megabyte_arrive():
    def program(rank):
        payload = bytes(range(256)) * 4096 if rank else b""
        merged = AGREEMENTS.of(None).exchange(payload, lambda *all_: b"".join(all_), TIMEOUT_S, "bytes")
        return merged == bytes(range(256)) * 4096

    assert assert_all_ok(run_ranks(program, 2)) == [True, True]


@pytest.mark.parametrize("init", ["file", "tcp"])
def test_nothing_grows_over_500_exchanges(init):
    def program(rank):
        def kept() -> tuple[int, int]:
            dist.barrier()
            store = dist.distributed_c10d._get_default_store()
            hub = AGREEMENTS.of(None).peers.hub
            counts = store.num_keys(), 0 if hub is None else len(hub.exchanges)
            dist.barrier()
            return counts

        exchange(rank)
        before = kept()
        for n in range(500):
            exchange(n)
        return before, kept()

    for before, after in assert_all_ok(run_ranks(program, 3, init=init)):
        assert after == before
        assert after[1] == 0


def test_nothing_is_left_after_failures_and_long_waits_in_a_tree(monkeypatch):
    monkeypatch.setattr(peers, "FAN_OUT", 2)

    def program(rank):
        for slow in range(7):
            if rank == slow:
                time.sleep(0.03)
            exchange(rank)
            if rank == slow:
                AGREEMENTS.of(None).fail(ValueError("boom"))
            else:
                assert ending(lambda: exchange(rank)).startswith(f"PeerFailed: Rank {slow} failed")
        dist.barrier()
        hub = AGREEMENTS.of(None).peers.hub
        return 0 if hub is None else len(hub.exchanges)

    assert assert_all_ok(run_ranks(program, 7)) == [0] * 7


def test_the_users_collectives_are_left_alone():
    def program(rank):
        order = []
        for n in range(5):
            order.append(exchange(n))
            dist.barrier()
            gathered = [None, None]
            dist.all_gather_object(gathered, (rank, n))
            order.append(gathered)
        return order

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one


def test_time_of_one_exchange_with_8_ranks(capsys):
    def program(rank):
        agreement = AGREEMENTS.of(None)
        part = Part(ran="0123456789abcdef", worst_ms=1.25, best_ms=1.25, total_fs=125 * 10**10, measured=1)
        payload = Payload("run", rank, parts={"fedcba9876543210": part}).encode()
        times_ms = []
        for _ in range(100):
            began = time.perf_counter()
            agreement.exchange(payload, merge, TIMEOUT_S, "a timing")
            times_ms.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times_ms), min(times_ms)

    for world_size in (2, 8):
        medians_ms, best_ms = zip(*assert_all_ok(run_ranks(program, world_size)), strict=True)
        with capsys.disabled():
            sys.stdout.write(
                f"\n  exchange, {world_size} ranks, {os.cpu_count()} cores: {max(medians_ms):.2f} ms (median)"
            )
        # The promise, 1 ms with 8 ranks, holds where each rank has a core. The best: what others do on the
        # machine only adds. Polling, or a wait that is woken by its time-out, would show in each.
        assert max(best_ms) < 50


# ---- somebody fails


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("init", ["file", "tcp"])
def test_a_failing_rank_is_told_at_once_and_the_next_exchange_works(init, failing):
    def program(rank):
        exchange(rank)
        if rank == failing:
            AGREEMENTS.of(None).fail(ValueError("no such tensor"))
            return "failed", 0.0, exchange(rank)
        began = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            exchange(rank)
        assert (caught.value.rank, caught.value.error) == (failing, "ValueError: no such tensor")
        return str(caught.value), time.monotonic() - began, exchange(rank)

    results = assert_all_ok(run_ranks(program, 3, init=init))
    for rank, (text, waited_s, then) in enumerate(results):
        assert then == [0, 1, 2]
        if rank != failing:
            assert text.startswith(f"Rank {failing} failed")
            assert "ValueError: no such tensor" in text
            assert waited_s < SOON_S


def test_all_ranks_may_fail_at_once_and_the_next_exchange_works():
    def program(rank):
        for n in range(5):
            AGREEMENTS.of(None).fail(ValueError(f"rank {rank}, {n}"))
        return exchange(rank)

    results = run_ranks(program, 3)
    assert assert_all_ok(results) == [[0, 1, 2]] * 3
    assert max(result.elapsed_s for result in results) < SOON_S


def test_a_rank_may_fail_before_its_first_exchange():
    def program(rank, first):
        if rank == first:
            AGREEMENTS.of(None).fail(ValueError("early"))
        else:
            time.sleep(0.2 if rank == 1 else 0.0)  # on purpose: it comes when the failure is known
            assert ending(lambda: exchange(rank)).startswith(f"PeerFailed: Rank {first} failed")
        return exchange(rank)

    for first in (0, 2):
        assert assert_all_ok(run_ranks(program, 3, first)) == [[0, 1, 2]] * 3


def test_a_rank_without_a_config_leaves_its_peers_without_one():
    def program(rank):
        if rank == 1:
            AGREEMENTS.of(None).fail(NoValidConfig("matmul[64]: all 2 configs failed on some rank."))
            return
        with pytest.raises(NoValidConfig, match=r"matmul\[64\]: all 2 configs failed") as caught:
            exchange(rank)
        assert isinstance(caught.value, PeerFailed)
        assert caught.value.rank == 1

    assert_all_ok(run_ranks(program, 2))


def test_a_slow_peer_still_hears_of_a_failure_when_the_failing_host_has_left():
    def program(rank, note):
        exchange(rank)
        if rank == 0:  # serves the store
            note.write_text(str(os.getpid()))
            AGREEMENTS.of(None).fail(ValueError("boom"))
            os._exit(1)
        wait_for(lambda: note.exists() and note.read_text() and is_gone(int(note.read_text())))
        return [ending(lambda: exchange(rank)) for _ in range(2)]

    zero, *others = run_ranks(program, 3, Path.cwd() / "pid")
    assert zero.exitcode == 1, describe(zero)
    for first, second in assert_all_ok(others):
        assert first.startswith("PeerFailed: Rank 0 failed")
        assert "ValueError: boom" in first
        assert second.startswith("AgreementTimeout: ")  # and it is still gone at the next
        assert "rank 0" in second


def test_ctrl_c_while_waiting_is_raised_soon_and_told():
    def program(rank, note):
        exchange(rank)
        if rank == 0:
            interrupt_when_waiting()
            began = time.monotonic()
            end = ending(lambda: exchange(rank))
            waited_s = time.monotonic() - began
            note.touch()
            return end, waited_s
        wait_for(note.exists)
        return ending(lambda: exchange(rank))

    (zero, waited_s), one = assert_all_ok(run_ranks(program, 2, Path.cwd() / "interrupted"))
    assert zero.startswith("KeyboardInterrupt")
    assert waited_s < SOON_S
    assert one.startswith("PeerFailed: Rank 0 failed")
    assert "KeyboardInterrupt" in one


def test_a_merge_that_raises_is_a_failure_of_the_rank_that_merges():
    def program(rank):
        def refuse(*payloads: bytes) -> bytes:
            raise KeyError("payload")

        merge_ = refuse if rank == 0 else join
        return ending(lambda: AGREEMENTS.of(None).exchange(b"x", merge_, TIMEOUT_S, "a test")), exchange(rank)

    (zero, _), (one, then) = assert_all_ok(run_ranks(program, 2))
    assert zero == "KeyError: 'payload'"
    assert one.startswith("PeerFailed: Rank 0 failed")
    assert then == [0, 1]


# ---- somebody does not come


@pytest.mark.parametrize(
    ("absent", "init"),
    [((0,), "file"), ((0,), "tcp"), ((2,), "tcp"), ((0, 3), "file"), ((0, 3), "tcp"), ((1, 2, 3), "file")],
    ids=str,
)
def test_absent_ranks_are_named_by_all_others_in_time(init, absent):
    present = [rank for rank in range(4) if rank not in absent]

    def program(rank):
        if rank in absent:
            return None
        meet(*present)
        began = time.monotonic()
        with pytest.raises(AgreementTimeout) as caught:
            exchange(rank, SHORT_S)
        assert caught.value.missing_ranks == absent
        return str(caught.value), time.monotonic() - began

    results = assert_all_ok(run_ranks(program, 4, init=init))
    texts, waited_s = zip(*(results[rank] for rank in present), strict=True)
    for text in texts:
        assert (f"rank {absent[0]} " if len(absent) == 1 else f"ranks {list(absent)} ") in text
        assert re.search(r"waited \d\.\d s for ", text)
    # Whoever came later than the first waited for less.
    assert SHORT_S - 0.1 < max(waited_s) < IN_TIME_S


@pytest.mark.parametrize("absent", [0, 1, 2, 5], ids="rank {}".format)
def test_an_absent_rank_of_a_tree_is_named_and_not_those_that_wait_for_it(monkeypatch, absent):
    monkeypatch.setattr(peers, "FAN_OUT", 2)

    def program(rank):
        exchange(rank)
        if rank != absent:
            meet(*(other for other in range(7) if other != absent))
            with pytest.raises(AgreementTimeout) as caught:
                exchange(rank, SHORT_S)
            assert caught.value.missing_ranks == (absent,)

    assert_all_ok(run_ranks(program, 7))


@pytest.mark.parametrize(
    ("late", "init", "first"),
    [(0, "file", True), (1, "file", True), (0, "tcp", True), (0, "file", False), (1, "tcp", False)],
    ids=str,
)
def test_a_late_rank_learns_that_it_was_given_up_and_the_next_exchange_works(init, late, first):
    def program(rank, note):
        if not first:
            exchange(rank)
        if rank == late:
            wait_for(note.exists)
        else:
            meet(*(other for other in range(3) if other != late))
        with pytest.raises(AgreementTimeout) as caught:
            exchange(rank, SHORT_S)
        assert caught.value.missing_ranks == (late,)
        note.touch()
        return exchange(rank)

    assert assert_all_ok(run_ranks(program, 3, Path.cwd() / "given up", init=init)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("killed", "init"), [(0, "file"), (0, "tcp"), (1, "tcp")], ids=str)
def test_a_killed_rank_is_named_by_all_others(init, killed, monkeypatch):
    monkeypatch.setattr(exchange_module, "SIGNING_S", SOON_S)  # a busy survivor is not to be named too

    def program(rank):
        exchange(rank)
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(*(other for other in range(3) if other != killed))
        began = time.monotonic()
        with pytest.raises(AgreementTimeout, match=rf"rank {killed}\b") as caught:
            exchange(rank, SHORT_S)
        assert caught.value.missing_ranks == (killed,)
        return time.monotonic() - began

    results = run_ranks(program, 3, init=init)
    assert_killed(results[killed])
    waited_s = assert_all_ok([result for result in results if result.rank != killed])
    assert max(waited_s) < IN_TIME_S


def test_two_killed_ranks_are_both_named_though_one_hosted_the_store(monkeypatch):
    monkeypatch.setattr(exchange_module, "SIGNING_S", SHORT_S)

    def program(rank):
        exchange(rank)
        if rank in (0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        meet(1, 2)
        return ending(lambda: exchange(rank, SHORT_S))

    results = run_ranks(program, 4)
    assert_killed(results[0])
    assert_killed(results[3])
    for text in assert_all_ok(results[1:3]):
        assert "ranks [0, 3]" in text


def test_a_rank_killed_after_it_posted_costs_nobody_the_exchange():
    def program(rank, note):
        exchange(rank)
        if rank == 1:
            note.write_text(str(os.getpid()))
        heard = listen() if rank == 0 else []
        meet()
        if rank == 0:
            wait_for(lambda: ("post", 1) in heard)
            os.kill(int(note.read_text()), signal.SIGKILL)
            wait_for(lambda: is_gone(int(note.read_text())))
        return exchange(rank)

    results = run_ranks(program, 3, Path.cwd() / "pid")
    assert_killed(results[1])
    assert assert_all_ok([results[0], results[2]]) == [[0, 1, 2]] * 2


# ---- somebody is slow, or stuck


@pytest.fixture
def quick_heartbeats(monkeypatch):
    """Let the thread that acts for a busy rank act often; peers wait for it three times as long."""
    monkeypatch.setattr(attendant, "HEARTBEAT_S", SHORT_S / 3)


def test_heartbeats_extend_the_deadline_while_a_rank_compiles(quick_heartbeats):
    def program(rank):
        exchange(rank)
        meet()
        if rank == 1:
            with AGREEMENTS.of(None).busy():
                time.sleep(2.5 * SHORT_S)
        began = time.monotonic()
        return exchange(rank, SHORT_S), time.monotonic() - began

    results = assert_all_ok(run_ranks(program, 3))
    assert [value for value, _ in results] == [[0, 1, 2]] * 3
    assert results[0][1] > 2 * SHORT_S


def test_heartbeats_extend_the_deadline_at_most_tenfold(quick_heartbeats):
    def program(rank, note):
        exchange(rank)
        if rank == 1:
            with AGREEMENTS.of(None).busy():
                meet()
                wait_for(note.exists)
        else:
            meet()
        began = time.monotonic()
        text = ending(lambda: exchange(rank, 0.1))
        note.touch()
        return text, time.monotonic() - began

    results = assert_all_ok(run_ranks(program, 3, Path.cwd() / "given up"))
    for text, _ in results:
        assert text.startswith("AgreementTimeout: ")
        assert "for rank 1 to agree" in text
    assert 0.9 < max(waited_s for _, waited_s in results) < SOON_S


def test_beats_of_an_earlier_exchange_extend_nothing(monkeypatch):
    monkeypatch.setattr(attendant, "HEARTBEAT_S", SOON_S)  # a beat would buy the tenfold

    def program(rank):
        exchange(rank)
        with AGREEMENTS.of(None).busy():
            pass
        exchange(rank)
        if rank == 1:
            return None
        began = time.monotonic()
        assert ending(lambda: exchange(rank, SHORT_S)).startswith("AgreementTimeout")
        return time.monotonic() - began

    assert assert_all_ok(run_ranks(program, 2))[0] < IN_TIME_S


def test_a_peer_stuck_in_a_collective_of_its_own_is_told_why(quick_heartbeats):
    def program(rank, note):
        agreement = AGREEMENTS.of(None)
        exchange(rank)
        if rank == 0:
            agreement.fail(ValueError("boom"))
            wait_for(note.exists)
            return None
        told = []
        with agreement.running("step", 60.0, "raise", told.append):
            wait_for(lambda: told)
        note.touch()
        return told, ending(lambda: exchange(rank))

    _, (told, end) = assert_all_ok(run_ranks(program, 2, Path.cwd() / "told"))
    (text,) = told
    assert text.startswith("Rank 1 is still in step, but rank 0 has failed (ValueError: boom).")
    assert "on_stuck='abort' would end its process" in text
    assert end.startswith("PeerFailed: Rank 0 failed")


def test_a_stuck_peer_is_ended_when_that_is_asked_for(quick_heartbeats):
    def program(rank, note):
        agreement = AGREEMENTS.of(None)
        exchange(rank)
        if rank == 0:
            agreement.fail(ValueError("boom"))
            wait_for(lambda: note.exists() and note.read_text() and is_gone(int(note.read_text())))
            return
        note.write_text(str(os.getpid()))
        with agreement.running("step", 0.5, "abort", lambda text: sys.stderr.write(f"{text}\n")):
            time.sleep(60)

    zero, one = run_ranks(program, 2, Path.cwd() / "pid")
    assert_all_ok([zero])
    assert one.exitcode == 1, describe(one)
    assert "Rank 1 is ended" in one.stderr
    assert "in program" in one.stderr  # where it stood
    assert one.elapsed_s < 30  # half of what it would have slept


# ---- which agreement a call uses


def test_a_forked_child_of_a_rank_is_alone():
    def program(rank):
        exchange(rank)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if exchange(7) == [7] else 1)
        status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status), exchange(rank)

    assert assert_all_ok(run_ranks(program, 2)) == [(0, [0, 1])] * 2


def test_forked_children_of_a_rank_may_be_ranks_of_a_group_of_their_own():
    def program(rank, directory):
        exchange(rank)
        pids = []
        for child in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    dist.distributed_c10d._world.pg_map.clear()  # the parent's groups are not the child's
                    dist.distributed_c10d.GroupMember.WORLD = None
                    store = dist.FileStore(str(directory / f"children of {rank}"), 2)
                    dist.init_process_group("gloo", store=store, rank=child, world_size=2)
                    os._exit(0 if exchange(child) == [0, 1] else 1)
                finally:
                    os._exit(2)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        return codes, exchange(rank)

    assert assert_all_ok(run_ranks(program, 2, Path.cwd())) == [([0, 0], [0, 1])] * 2


@pytest.mark.parametrize("init", ["file", "tcp"])
def test_groups_do_not_hear_each_other(init):
    def program(rank):
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        row, column = rows[rank // 2], columns[rank % 2]
        heard = []
        for n in range(5):
            time.sleep(0.01 * ((rank + n) % 3))
            heard += [exchange(rank, group=row), exchange(rank, group=column), exchange(rank)]
        return heard

    results = assert_all_ok(run_ranks(program, 4, init=init))
    for rank, heard in enumerate(results):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert heard == [row, column, [0, 1, 2, 3]] * 5
