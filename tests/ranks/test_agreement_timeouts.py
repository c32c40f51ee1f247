"""A rank does not come to an exchange, or is slow or stuck: who waits for how long, and how all end."""

import datetime
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from process_states import has_ended, status_of
from rank_programs import SHORT_S, SOON_S, ending, exchange, wait_for

from dist_autotune import AgreementTimeout
from dist_autotune.ranks import exchange as exchange_module
from dist_autotune.ranks.courier import OPERATION_S, peek
from dist_autotune.ranks.group import GROUPS
from ranks import assert_all_ok, describe, meet, run_ranks

# ---- somebody does not come


@pytest.mark.parametrize("store", ["in another process", "on rank 0"])
def test_the_timeout_holds_for_a_stopped_rank_0_and_all_go_on_when_it_wakes(store):
    timeout_s, here = 3 * SHORT_S, Path.cwd()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def program(rank):
        if store == "on rank 0":
            dist.init_process_group(
                "gloo", store=dist.TCPStore("127.0.0.1", port, 3, rank == 0), rank=rank, world_size=3
            )
        exchange(rank)
        (here / f"heard {rank}").touch()
        if rank == 0:  # stopped earlier, it would not serve them the end of the first exchange
            wait_for(lambda: all((here / f"heard {other}").exists() for other in (1, 2)))
            (here / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            ending(lambda: exchange(rank))
            heard = exchange(rank)
            GROUPS.of(None).leave()
            return heard
        wait_for(lambda: (here / "pid").exists() and (here / "pid").read_text())
        pid = int((here / "pid").read_text())
        wait_for(lambda: status_of(pid)[0] == "T")
        began = time.monotonic()
        with pytest.raises(AgreementTimeout, match="rank 0"):
            exchange(rank, timeout_s)
        waited_s = time.monotonic() - began
        (here / f"ended {rank}").touch()
        wait_for(lambda: all((here / f"ended {other}").exists() for other in (1, 2)))
        if rank == 1:
            os.kill(pid, signal.SIGCONT)
        late_s = OPERATION_S if store == "on rank 0" else 0.6 * timeout_s
        assert timeout_s - 0.1 < waited_s < timeout_s + late_s
        heard = exchange(rank)
        GROUPS.of(None).leave()
        return heard

    init = "tcp" if store == "in another process" else "none"
    assert assert_all_ok(run_ranks(program, 3, init=init)) == [[0, 1, 2]] * 3


# ---- somebody is slow, or stuck


def test_a_value_that_a_peer_deletes_when_it_has_been_found_is_not_waited_for():
    class Vanishing(dist.HashStore):
        def check(self, keys):
            return super().check(keys) and all(map(self.delete_key, keys))

    (store := Vanishing()).set_timeout(datetime.timedelta(seconds=SHORT_S))
    store.set("7/beats", "2")
    assert peek(store, "7/beats") == b""


def test_a_look_at_a_value_that_is_not_there_yet_wakes_nobody_who_waits_for_it():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(waits.get, "7")
        assert not any(peek(server, "7") for _ in range(1000))
        server.set("7", "order")
        assert found.result() == b"order"


def test_heartbeats_extend_the_deadline_at_most_tenfold(quick_heartbeats, monkeypatch):
    tenfold = 4  # a store that gives no answer within half of the time-out is lost: it must not be too short
    monkeypatch.setattr(exchange_module, "PATIENCE", tenfold)

    def program(rank, note):
        exchange(rank)
        if rank == 1:
            with GROUPS.of(None).busy():
                meet()
                wait_for(note.exists)
        else:
            meet()
        began = time.monotonic()
        text = ending(lambda: exchange(rank, SHORT_S))
        note.touch()
        return text, time.monotonic() - began

    results = assert_all_ok(run_ranks(program, 3, Path.cwd() / "given up"))
    for text, _ in results:
        assert text.startswith("AgreementTimeout: ")
        assert "for rank 1 to agree" in text
    assert 0.9 * tenfold < max(waited_s for _, waited_s in results) < SOON_S


# ---- somebody fails


def test_a_slow_peer_still_hears_of_a_failure_when_the_failing_host_has_left():
    def program(rank, note):
        exchange(rank)
        if rank == 0:  # serves the store
            note.write_text(str(os.getpid()))
            GROUPS.of(None).fail(ValueError("boom"))
            os._exit(1)
        wait_for(lambda: note.exists() and note.read_text() and has_ended(int(note.read_text())))
        first = ending(lambda: exchange(rank))
        meet(1, 2)
        return first, ending(lambda: exchange(rank, SHORT_S))

    zero, *others = run_ranks(program, 3, Path.cwd() / "pid")
    assert zero.exitcode == 1, describe(zero)
    for first, second in assert_all_ok(others):
        assert first.startswith("PeerFailed: rank 0 failed")
        assert "ValueError: boom" in first
        assert second.startswith("AgreementTimeout: ")  # and it is still gone at the next
        assert "rank 0" in second
