"""A rank does not come to an exchange, or is slow or stuck: who waits for how long, and how all end."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_programs import IN_TIME_S, SHORT_S, SOON_S, ending, exchange, is_gone, listen, wait_for

from dist_autotune import AgreementTimeout
from dist_autotune.ranks import exchange as exchange_module
from dist_autotune.ranks import watchdog
from dist_autotune.ranks.group import GROUPS
from dist_autotune.ranks.watchdog import Watch
from ranks import assert_all_ok, assert_killed, describe, meet, run_ranks

# ---- somebody does not come


@pytest.mark.parametrize(
    ("absent", "init"),
    [((0,), "tcp"), ((2,), "tcp"), ((0, 3), "file"), ((1, 2, 3), "file")],
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


@pytest.mark.parametrize("absent", [0, 5], ids="rank {}".format)
def test_an_absent_rank_of_seven_is_named_and_nobody_else(absent):
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
    monkeypatch.setattr(exchange_module, "ARRIVAL_S", SOON_S)  # a busy survivor is not to be named too

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


def test_killed_ranks_are_all_named_long_before_the_time_out():
    def program(rank):
        exchange(rank)
        meet()
        if rank in (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return [ending(lambda: exchange(rank, 60.0)) for _ in range(2)]

    results = run_ranks(program, 4)
    for first, second in assert_all_ok([results[0], results[2]]):
        assert first.startswith("AgreementTimeout: ")
        assert "ranks [1, 3]" in first
        assert "ranks [1, 3]" in second  # they stay away
    assert max(result.elapsed_s for result in results) < 30


def test_two_killed_ranks_are_both_named_though_one_hosted_the_store(monkeypatch):
    monkeypatch.setattr(exchange_module, "ARRIVAL_S", SHORT_S)

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


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("store", ["in another process", "on rank 0"])
def test_the_timeout_holds_for_a_stopped_rank_0_and_all_go_on_when_it_wakes(store, monkeypatch):
    monkeypatch.setattr(exchange_module, "SILENCE_S", SHORT_S)  # below the time-out, as usual
    timeout_s, here = 2 * SHORT_S, Path.cwd()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def program(rank):
        if store == "on rank 0":
            dist.init_process_group(
                "gloo", store=dist.TCPStore("127.0.0.1", port, 3, rank == 0), rank=rank, world_size=3
            )
        exchange(rank)
        if rank == 0:
            (here / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            ending(lambda: exchange(rank))
            return exchange(rank)
        wait_for(lambda: (here / "pid").exists() and (here / "pid").read_text())
        pid = int((here / "pid").read_text())
        wait_for(lambda: is_stopped(pid))
        began = time.monotonic()
        with pytest.raises(AgreementTimeout, match="rank 0"):
            exchange(rank, timeout_s)
        waited_s = time.monotonic() - began
        (here / f"ended {rank}").touch()
        wait_for(lambda: all((here / f"ended {other}").exists() for other in (1, 2)))
        if rank == 1:
            os.kill(pid, signal.SIGCONT)
        assert timeout_s - 0.1 < waited_s < 1.6 * timeout_s
        return exchange(rank)

    init = "tcp" if store == "in another process" else "none"
    assert assert_all_ok(run_ranks(program, 3, init=init)) == [[0, 1, 2]] * 3


# ---- somebody is slow, or stuck


def test_heartbeats_extend_the_deadline_while_a_rank_compiles(quick_heartbeats):
    def program(rank):
        exchange(rank)
        meet()
        if rank == 1:
            with GROUPS.of(None).busy():
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
            with GROUPS.of(None).busy():
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
    monkeypatch.setattr(watchdog, "HEARTBEAT_S", SOON_S)  # a beat would buy the tenfold

    def program(rank):
        exchange(rank)
        with GROUPS.of(None).busy():
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
        group = GROUPS.of(None)
        exchange(rank)
        if rank == 0:
            group.fail(ValueError("boom"))
            wait_for(note.exists)
            return None
        told = []
        with group.running(Watch("step", 60.0, "raise", told.append)):
            wait_for(lambda: told)
        note.touch()
        return told, ending(lambda: exchange(rank))

    _, (told, end) = assert_all_ok(run_ranks(program, 2, Path.cwd() / "told"))
    (text,) = told
    assert text.startswith("Rank 1 is still in step, but rank 0 has failed (ValueError: boom).")
    assert "on_stuck='abort' would end its process" in text
    assert end.startswith("PeerFailed: rank 0 failed")


def test_a_stuck_peer_is_ended_when_that_is_asked_for(quick_heartbeats):
    def program(rank, note):
        group = GROUPS.of(None)
        exchange(rank)
        if rank == 0:
            group.fail(ValueError("boom"))
            wait_for(lambda: note.exists() and note.read_text() and is_gone(int(note.read_text())))
            return
        note.write_text(str(os.getpid()))
        with group.running(Watch("step", 0.5, "abort", lambda text: sys.stderr.write(f"{text}\n"))):
            time.sleep(60)

    zero, one = run_ranks(program, 2, Path.cwd() / "pid")
    assert_all_ok([zero])
    assert one.exitcode == 1, describe(one)
    assert "Rank 1 ends" in one.stderr
    assert "in program" in one.stderr  # where it stood
    assert one.elapsed_s < 30  # half of what it would have slept
