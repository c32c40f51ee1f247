"""Strangers at the hub's door: malformed, slow, huge and half-open connections while four ranks work."""

import contextlib
import os
import random
import socket
import struct
import threading

import torch
from kernels_for_tests import Bench, double, launch, numbers
from operation_runs import on_ranks
from rank_programs import blocks_of, exchange, statuses_of, tune, wait_for

from dist_autotune.ranks.group import GROUPS
from ranks import meet

KNOCKS = 3000
HELD = 400  # connections that a knocker keeps open at once: more than the hub does
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


def knock(port, is_over):
    """Connect again and again, and say and do what no rank would, until it `is_over`."""
    generator = random.Random(0)
    huge = b"\x00\x10\x00\x00" + b"[" * (1 << 20)
    said = [b"", b"h", b"[" * 20, b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000, b"\xff" * 64, b"0" * 32, huge]
    held: list[socket.socket] = []
    while not is_over():
        with contextlib.suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            held.append(stranger)
            stranger.setblocking(False)
            stranger.send(generator.choice(said))
        if len(held) > HELD or (held and generator.random() < 0.3):
            gone = held.pop(generator.randrange(len(held)))
            if generator.random() < 0.5:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            gone.close()
        for slow in held[-3:]:
            with contextlib.suppress(OSError):
                slow.send(b"x")
        yield


@on_ranks(4)
def test_thousands_of_strangers_cost_a_session_of_four_ranks_nothing(rank, tmp_path):
    exchange(rank)
    rendezvous = GROUPS.of(None).rendezvous
    port, over = rendezvous.store.read_address().port, tmp_path / "over"
    meet()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    knocker = 0
    if rank == 3:
        knocker = os.fork()
        if knocker == 0:
            try:
                for knocks, _ in enumerate(knock(port, over.exists)):
                    if knocks == KNOCKS:
                        (tmp_path / "enough").touch()
                os._exit(0)
            finally:
                os._exit(1)
    bench, x = Bench(), numbers()
    first, second = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}), bench.kernel({16: 1.0, 32: 2.0}, double)

    def thunk():
        launch(second, x)
        return launch(first, x)

    step, rounds = tune(bench, thunk), 0
    while not any(exchange(int(rank == 0 and (tmp_path / "enough").exists()))):
        step.retune()
        assert torch.equal(step(), x + 1)
        assert set(statuses_of(step).values()) == {"tuned"}
        rounds += 1
    over.touch()
    if knocker:
        assert os.waitpid(knocker, 0)[1] == 0
    meet()
    hub = rendezvous.hub
    if hub is not None:
        wait_for(lambda: not hub.strangers)
    after = threading.active_count(), len(os.listdir("/proc/self/fd"))
    winners, rounds, before, after = blocks_of(step), rounds, before, after
    assert winners == {"add64": 32, "double64": 16}
    assert rounds > 1
    assert after[0] <= before[0] + 2  # a watchdog, and who listens for ballots
    assert after[1] <= before[1] + 2 * (1 + 4)  # their connections to the hub, here its other ends too
