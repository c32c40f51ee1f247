"""The processes of a host share Triton's cache: each binary is compiled once, each failure is met once."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from candidates import ENDLESS, GOOD, Compiler, Preflight, arrive, kernel
from candidates import preflight as preflight_launch

from dist_autotune.compilation import pool
from dist_autotune.compilation.pool import PoolOptions
from dist_autotune.triton_api.launch import Launch
from ranks import assert_all_ok, run_ranks

BLOCKS = (16, 64, 128)


def preflight(*blocks: int, **options: Any) -> Preflight:
    tuner = kernel(*blocks)
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    launch = Launch(tuner, (x, y), {"grid": (1,)})
    return preflight_launch(launch, PoolOptions(**{"session": "one"} | options))


def once_it_compiles(compiler: Compiler, block: int, action: Any) -> None:
    """Do `action` on another thread once some process compiles `block`."""

    def act() -> None:
        compiler.wait_for(block)
        action()

    threading.Thread(target=act, daemon=True).start()


def test_two_processes_compile_each_binary_once_in_total(device, compiler, tmp_path):
    def program(rank: int) -> Preflight:
        arrive(tmp_path, rank, 2)
        return preflight(*BLOCKS, local_rank=rank, local_ranks=2)

    found = assert_all_ok(run_ranks(program, 2, init="none"))
    assert sorted(compiler.compilations()) == sorted(BLOCKS)
    all_counts = [each.counts for each in found]
    assert sum(counts.compiled for counts in all_counts) == len(BLOCKS)
    assert all(counts.compiled + counts.from_peers + counts.cached == len(BLOCKS) for counts in all_counts)
    assert found[0].reasons == found[1].reasons
    (reason,) = found[0].reasons.values()  # of 128: compiled once, and loaded on neither rank
    assert reason.startswith("OutOfResources")
    assert not list((tmp_path / "triton" / "dist_autotune-locks").glob("*/*"))


def test_a_rank_compiles_as_many_at_a_time_as_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [PoolOptions(local_rank=rank, local_ranks=8).workers for rank in range(8)] == [2] * 8
    assert [PoolOptions(local_rank=rank, local_ranks=3).workers for rank in range(3)] == [6, 5, 5]
    assert PoolOptions(local_rank=63, local_ranks=64).workers == 1


@pytest.mark.parametrize(("cores", "ranks", "jobs"), [(128, 8, 8), (16, 8, 1), (3, 1, 1), (1, 1, 1)])
def test_while_runs_go_on_half_of_a_rank_s_cores_are_left_to_it(monkeypatch, cores, ranks, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert PoolOptions(local_ranks=ranks, in_background=True).workers == jobs
    assert PoolOptions(local_ranks=ranks, in_background=True, jobs=5).workers == 5


def test_a_killed_rank_stops_neither_its_peer_nor_leaves_its_compiler(device, compiler):
    def program(rank: int) -> Preflight | None:
        if rank == 1:
            compiler.behaves({GOOD: "spin"})
            once_it_compiles(compiler, GOOD, lambda: os.kill(os.getpid(), signal.SIGKILL))
            preflight(GOOD)
        compiler.wait_for(GOOD)  # rank 1 holds the claim
        return preflight(GOOD, 64)

    zero, one = run_ranks(program, 2, init="none")
    assert one.signal == signal.SIGKILL
    (found,) = assert_all_ok([zero])
    assert found.reasons == {}
    assert found.counts.compiled == 2
    assert compiler.compilations().count(GOOD) == 2
    assert compiler.processes_left() == []


def test_a_candidate_without_end_costs_two_ranks_one_limit(device, compiler, tmp_path):
    def program(rank: int) -> list[str]:
        compiler.behaves({ENDLESS: "spin"})
        arrive(tmp_path, rank, 2)
        return list(preflight(ENDLESS, local_rank=rank, local_ranks=2, limit_s=2.0).reasons.values())

    assert assert_all_ok(run_ranks(program, 2, init="none")) == [["did not compile within 2 s"]] * 2
    assert compiler.compilations() == [ENDLESS]


def test_ctrl_c_leaves_no_process_and_no_claim(device, compiler):
    def program(rank: int) -> int:
        compiler.behaves({64: "spin"})
        once_it_compiles(compiler, 64, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            preflight(64)
        assert compiler.processes_left() == []
        compiler.behaves({})
        return preflight(64, limit_s=60.0).counts.compiled

    assert assert_all_ok(run_ranks(program, 1, init="none")) == [1]


def test_a_rank_that_cannot_write_claims_compiles_for_itself(device, compiler, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "dist_autotune-locks").touch()  # a file where a directory is needed
    found = preflight(16, 64)
    assert found.reasons == {}
    assert found.counts.compiled == 2
    assert "no locks in" in found.counts.remark


def test_a_claim_whose_owner_is_stopped_is_not_respected_for_ever(device, compiler, monkeypatch):
    def stays_claimed(key: str, session: str) -> None:
        raise BlockingIOError

    monkeypatch.setattr(pool, "CompileLock", stays_claimed)
    monkeypatch.setattr(pool, "LOCK_GRACE_S", 0.2 - 2 * 60)
    found = preflight(64, limit_s=60.0)
    assert found.reasons == {}
    assert found.counts.compiled == 1


def test_what_is_left_when_the_peers_would_wait_no_longer_is_not_compiled(device, compiler):
    found = preflight(16, 64, until=time.monotonic())
    assert found.counts.failed == 2
    assert compiler.compilations() == []
    assert all("longer than the peers wait" in reason for reason in found.reasons.values())


def test_options_follow_torchrun_and_what_the_peers_wait(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_TIMEOUT_S", "7")
    options = PoolOptions.of_rank("s", position=11, ranks=16, peers_wait_s=100.0)
    assert (options.local_rank, options.local_ranks, options.limit_s) == (3, 4, 7.0)
    assert options.until - time.monotonic() == pytest.approx(80.0, abs=5.0)
    monkeypatch.delenv("LOCAL_RANK")
    assert PoolOptions.of_rank("s", position=11, ranks=16, peers_wait_s=100.0).local_ranks == 16
