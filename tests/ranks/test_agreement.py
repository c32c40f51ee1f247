"""The exchange between ranks, without anything to tune: who gets what, in which group, and at what cost."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from operation_runs import on_ranks
from programs import environment_of_rank
from rank_programs import TIMEOUT_S, Boom, ending, exchange, failing_step, left, raise_, tuned_step, wait_for

from dist_autotune.ranks import courier, questions
from dist_autotune.ranks.group import GROUPS
from dist_autotune.ranks.watchdog import Watch
from ranks import assert_all_ok, run_ranks, store_server

# ---- what is left behind


@pytest.mark.parametrize("held", [False, True], ids=["let go", "still held by the program"])
@on_ranks(2)
def test_everything_that_was_started_for_a_group_ends_with_it(rank, held):
    def threads():
        return sum(thread.name.startswith("dist_autotune") for thread in threading.enumerate())

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    kept, counts = [], []
    for n in range(6):
        group = dist.new_group([0, 1])
        exchange(rank, group=group)
        with GROUPS.of(group).running(Watch("a run", TIMEOUT_S, "raise", print)):
            pass
        if n in (1, 5):
            wait_for(lambda: threads() <= 3)  # the watchdog, and two with a connection
            counts.append(descriptors())
        dist.barrier()
        dist.destroy_process_group(group)
        kept.append(group if held else None)
    before, after = counts
    assert held or after <= before  # of a group that is held, torch keeps its own


def test_the_store_holds_no_key_of_ours_behind_sessions_that_end_or_fail():
    def program(rank):
        step, _, _ = failing_step(rank, fails={1: lambda: raise_(Boom("boom"))}, at_run=3)
        endings = [ending(step).partition(":")[0].partition("(")[0] for _ in range(2)]
        sweep, _ = tuned_step({16: 1.0, 32: 2.0})
        with ThreadPoolExecutor(1) as pool:  # two sessions take turns
            turns = pool.submit(tuned_step({16: 1.0, 32: 2.0}, name="another")[0])
            sweep(8)
            turns.result(TIMEOUT_S)
        for n in (16, 24 if rank else 8):  # all ranks ask about the first one, and some about the second
            sweep(n)
            dist.barrier()
        sweep.retune()
        sweep(8)
        wait_for(lambda: not left())  # letters are answered beside the calls
        dist.barrier()
        return endings

    zero, one, two = assert_all_ok(run_ranks(program, 3, init="tcp"))
    assert zero == two == ["PeerFailed", "returned tensor"]
    assert one == ["Boom", "returned tensor"]


def test_letters_that_are_read_behind_the_next_session_leave_no_key_in_the_store(monkeypatch):
    def program(rank):
        read, genuine = threading.Event(), questions._Listener._read_letters
        if rank:  # rank 0 answers; these ask themselves, and their threads stand still

            def read_late(*args):
                read.wait(TIMEOUT_S)
                genuine(*args)

            monkeypatch.setattr(questions._Listener, "_read_letters", read_late)
        sweep, _ = tuned_step({16: 1.0, 32: 2.0})
        sweep(8)
        sweep(24 if rank else 8)
        dist.barrier()
        sweep.retune()
        sweep(8)
        read.set()
        wait_for(lambda: not left())
        dist.barrier()
        return sorted(key[0] for _, key, _ in sweep.untuned)

    assert assert_all_ok(run_ranks(program, 3, init="tcp")) == [[]] * 3


ENDS_WITHOUT_DESTROYING = """
import atexit, threading
atexit.register(lambda: print("left:", [t.name for t in threading.enumerate() if "dist_autotune " in t.name]))
import torch.distributed as dist
from dist_autotune.ranks.exchange import ExchangeWait
from dist_autotune.ranks.group import GROUPS
from dist_autotune.ranks.watchdog import Watch
dist.init_process_group("gloo")
group, watch = GROUPS.of(None), Watch("a call", 20.0, "raise", print)
assert group.exchange(b"1", lambda reports: b"%d" % len(reports), ExchangeWait("a test", 20.0)) == b"2"
counted = group.call_count("a session", watch)  # its listener waits for letters
dist.barrier()
"""


def test_a_program_that_keeps_its_group_ends_no_thread_inside_the_store(tmp_path):
    # The interpreter's end would find some in torch's code, and abort the process.
    program = tmp_path / "program.py"
    program.write_text(ENDS_WITHOUT_DESTROYING)
    with store_server(2) as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program)],
                env=os.environ | environment_of_rank(rank, 2, port),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)] == [
        (0, "left: []\n")
    ] * 2


def test_what_is_asked_of_a_courier_that_has_ended_fails_at_once():
    """As a thread that begins to connect while the program ends: it would wait for 30 s."""
    scout = courier.Courier(dict, "dist_autotune test")
    scout.close()
    scout.thread.join(TIMEOUT_S)
    connecting = courier.Courier(lambda: scout.do(dict.copy), "dist_autotune test")
    connecting.close()
    connecting.thread.join(TIMEOUT_S)
    assert not connecting.thread.is_alive()
    with pytest.raises(courier.StoreLost, match="has been closed"):
        connecting.do(dict.copy)


# ---- which agreement a call uses


@on_ranks(2)
def test_a_forked_child_of_a_rank_is_alone(rank):
    exchange(rank)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if exchange(7) == [7] else 1)
    status = os.waitpid(pid, 0)[1]
    assert (os.waitstatus_to_exitcode(status), exchange(rank)) == (0, [0, 1])
