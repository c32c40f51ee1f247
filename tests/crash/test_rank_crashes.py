"""One of several ranks is killed in a candidate's first launch: what all of them ban at the next start."""

import signal

import pytest
from crash_programs import EXHAUSTIVE, MS, die, guards, scripted, summary
from kernels_for_tests import Bench, launch, numbers
from rank_programs import TIMEOUT_S, ending, raise_, tune

from dist_autotune import TuningError
from ranks import assert_all_ok, run_ranks


def ranks_program(rank, cache, dies=None, leave=None):
    bench, x = Bench(), numbers()
    ms = {block: value + rank / 10 for block, value in MS.items()}
    events = {dies[1]: leave} if dies is not None and dies[0] == rank else {}
    kernel = bench.kernel(scripted(bench, ms, events))
    step = tune(bench, lambda: launch(kernel, x), cache=cache, timeout_s=TIMEOUT_S, **EXHAUSTIVE)
    text = ending(step)
    return summary(bench, step, rank) if dies is None else text


@pytest.mark.parametrize(("dying", "number"), [(0, signal.SIGKILL), (1, signal.SIGSEGV)], ids=str)
def test_after_one_rank_has_crashed_all_ban_its_candidate(tmp_cache, dying, number):
    leave = lambda: die(number)  # noqa: E731
    results = run_ranks(ranks_program, 2, tmp_cache, (dying, (32, 1)), leave, init="tcp")
    survivor = results[1 - dying]
    assert results[dying].signal == number
    assert survivor.value.startswith("AgreementTimeout: ")
    assert len(guards(tmp_cache)) == 2
    zero, one = assert_all_ok(run_ranks(ranks_program, 2, tmp_cache))
    for found in (zero, one):
        assert found["blocks"] == [16] * 3 + [64] * 4
        assert found["winners"] == {"add64": 64}
        assert list(found["banned"]) == ["add BLOCK: 32"]
        assert f"when rank {dying}'s process was killed (run 3 of " in found["banned"]["add BLOCK: 32"]
        assert found["timings"] == {"add": [1.1, 3.1]}
    assert zero["notes"] == one["notes"]
    assert guards(tmp_cache) == []


def twice(rank, cache, event):
    """Call a tuned function, and once more where the first call raised; `event` happens on one rank."""
    bench, x = Bench(), numbers()
    failing, when, what = event
    kernel = bench.kernel(scripted(bench, MS, {when: what} if failing == rank else {}))
    step = tune(bench, lambda: launch(kernel, x), cache=cache, timeout_s=TIMEOUT_S, **EXHAUSTIVE)
    first = ending(step)
    if first.startswith("AgreementTimeout"):
        return None
    bench.forget()
    step()
    return first.partition(":")[0], summary(bench, step, rank)


def test_after_a_dropped_session_the_next_of_these_processes_starts_anew_but_keeps_bans(tmp_cache):
    dying = (1, (32, 1), lambda: die(signal.SIGKILL))
    assert run_ranks(twice, 2, tmp_cache, dying, init="tcp")[1].signal == signal.SIGKILL
    failing = (0, (64, 1), lambda: raise_(TuningError("no")))  # drops the session, unlike the user's own
    zero, one = assert_all_ok(run_ranks(twice, 2, tmp_cache, failing))
    assert (zero[0], one[0]) == ("TuningError", "PeerFailed")
    for _, found in (zero, one):
        assert found["blocks"] == [16] * 3 + [64] * 4
        assert list(found["banned"]) == ["add BLOCK: 32"]
    assert guards(tmp_cache) == []
