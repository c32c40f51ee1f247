"""The model of GPUs in virtual time: what begins when, what a host sees of it, and whom it waits for."""

from __future__ import annotations

import itertools

import pytest
import torch
from virtual_gpu import EXCHANGE_MS, VirtualGpus, autotuned

from dist_autotune.triton_api.interception import INTERCEPTION

EXACT = 1e-9  # ms


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> VirtualGpus:
    return VirtualGpus(2).install(monkeypatch)


def close(ms: float) -> object:
    return pytest.approx(ms, abs=EXACT)


def test_a_stream_that_is_forked_begins_with_the_fork_and_what_joins_it_waits(gpus):
    gpu, side = gpus[0], torch.cuda.Stream()
    before = gpu.launch(1.0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copy = gpu.launch(0.3)
    kernel = gpu.launch(0.1)
    torch.cuda.current_stream().wait_stream(side)
    joined = gpu.launch(0.1)
    assert copy.begin_ms == kernel.begin_ms == before.end_ms
    assert joined.begin_ms == copy.end_ms > kernel.end_ms


def test_a_kernel_that_waits_for_flags_takes_as_long_as_they_are_late(gpus):
    gpu, side = gpus[0], gpus[0].new_stream()
    kernel = gpu.launch(0.1, gpus.flag("a"), 0.2, gpus.flag("b"), 0.3)
    assert kernel.end_ms is None
    assert kernel.waits_for == ["('a',)", "('b',)"]
    gpu.launch(0.05, on=side, sets=gpus.flag("b"))  # in time
    copy = gpu.launch(1.0, on=side, sets=gpus.flag("a"))
    assert kernel.ms == close(copy.end_ms - kernel.begin_ms + 0.2 + 0.3)


def test_a_peer_that_is_behind_goes_on_before_a_host_is_told_what_the_peer_may_decide(gpus):
    def program(gpu):
        seen = []
        if gpu.rank == 0:
            gpu.launch(gpus.flag("from 1"), host_ms=0.01)
            event = torch.cuda.current_stream().record_event()
            for _ in range(4):
                gpu.pass_ms(0.2)
                seen.append((event.query(), gpus[1].host_ms <= gpu.host_ms + 0.3))
        else:
            gpu.pass_ms(0.3)
            gpu.launch(0.2, host_ms=0.0, sets=gpus.flag("from 1"))  # done at 0.5
        return seen

    seen, _ = gpus.run(program)
    assert seen == [(False, True), (False, True), (True, True), (True, True)]


def test_a_host_that_waits_for_what_nobody_does_any_more_is_an_error_not_a_hang(gpus):
    def program(gpu):
        if gpu.rank == 0:
            gpu.launch(gpus.flag("from 1"))
            gpu.synchronize()

    with pytest.raises(AssertionError, match=r"ranks \[0\] wait for ever: nobody sets .*from 1"):
        gpus.run(program)


@pytest.mark.parametrize(("count", "is_dist"), [(1, False), (2, True)])
def test_ranks_that_are_tuned_wait_for_each_other_in_the_middle_of_their_calls(monkeypatch, count, is_dist):
    gpus = VirtualGpus(count).install(monkeypatch)
    ms = {16: 0.3, 32: 0.1, 64: 0.2}

    def program(gpu):
        runs = itertools.count()
        gpu.pass_ms(gpu.rank)

        def step():
            run, blocks = next(runs), []
            gpu.launch(0.05, sets=gpus.flag(run, gpu.rank))
            peer = gpus.flag(run, (gpu.rank + 1) % count)
            kernel = autotuned(ms, lambda block: (blocks.append(block), gpu.launch(peer, ms[block])))
            kernel[(1,)](0, 0, 64)
            gpu.synchronize()
            return blocks

        tuned = gpus.tuned(step, is_dist=is_dist)
        tuned()
        assert tuned.settled
        return tuned(), tuned.report

    for blocks, report in gpus.run(program):
        assert blocks == [32]
        assert report.world_size == (count if is_dist else 1)
    assert not INTERCEPTION.calls
    assert abs(gpus[0].host_ms - gpus[-1].host_ms) < EXCHANGE_MS + 1.0
