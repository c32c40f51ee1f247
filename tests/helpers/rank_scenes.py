"""A scene of `fuzz.py ranks`: a function on real ranks, what goes wrong, and how each rank must end."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from kernels_for_tests import Bench, add, double, is_outside, launch, numbers, out_of_resources
from random_programs import Kernel, draw_kernel, having, true_winners, viable_blocks
from rank_programs import SHORT_S, TIMEOUT_S, set_patience, tune, wait_for

from dist_autotune import is_tuning
from ranks import Result, describe, meet

FUNCTIONS = (add, double)
BEYOND_S = 10.0  # a rank ends at most so much after its time-out
SESSION_LIMIT_S = 90.0
OWN = {"raise": "Boom", "exit": "SystemExit", "interrupt": "KeyboardInterrupt"}
LAST_CALLS = {"stop": 3}  # until all is well again; else 1


class Boom(Exception):
    """What a thunk raises of its own."""


@dataclass(frozen=True)
class Fault:
    """What one rank does in its n-th run, or instead of a call."""

    kind: str  # "raise" | "exit" | "interrupt" | "absent" | "stop" | "kill" | "quit"
    rank: int
    at_run: int


@dataclass(frozen=True)
class Scene:
    """What happens; the same on all ranks."""

    number: int
    world_size: int
    options: dict[str, Any]
    kernels: tuple[Kernel, ...]
    fault: Fault | None
    delays: dict[tuple[int, int], float]  # (rank, run) -> seconds
    is_interpreted: bool

    @property
    def is_deadly(self) -> bool:
        return self.fault is not None and self.fault.kind in ("kill", "quit")

    @property
    def has_config(self) -> bool:
        return all(viable_blocks(kernel, n) for kernel in self.kernels for n in kernel.keys)


@dataclass
class Call:
    """How one call ended on one rank."""

    error: str  # the type's name; "" for a call that returned
    text: str
    seconds: float
    timeout_s: float
    is_settled: bool = False  # without a session, so without an exchange


@dataclass
class Played:
    """What one rank has to tell of a scene."""

    calls: list[Call] = field(default_factory=list)
    winners: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)  # -> (BLOCK, status)
    runs: int = 0
    report_runs: int = 0
    fault_call: int = 0  # in which the fault happens


def draw_scene(random: Random, number: int) -> Scene:
    """Return a scene."""
    world_size = random.choice((2, 2, 3, 3, 4))
    kernels = tuple(draw_kernel(random, world_size, is_plain=True) for _ in range(random.choice((1, 1, 2))))
    search = random.choice(({"n_warmup": 0, "n_repeat": 1}, {"n_warmup": 1, "n_repeat": 2}, {}))
    options = {
        "n_warmup": None,
        "n_repeat": None,
        **search,
        "objective": random.choice(("kernel", "kernel", "kernel", "thunk")),
        "rank_reduce": random.choice(("max", "mean")),
        "statistic": random.choice(("median", "mean", "min")),
    }
    kinds = ("",) * 9 + ("raise", "raise", "exit", "interrupt", "absent", "stop", "kill", "kill", "quit")
    kind = random.choice(kinds)
    fault = Fault(kind, random.randrange(world_size), random.randrange(1, 5)) if kind else None
    if not all(viable_blocks(kernel, n) for kernel in kernels for n in kernel.keys):
        fault = None  # the call ends by itself
    delays = {
        (random.randrange(world_size), random.randrange(1, 8)): random.choice((0.002, 0.02, 0.05))
        for _ in range(random.randrange(4))
    }
    return Scene(number, world_size, options, kernels, fault, delays, random.random() < 0.4)


# ---- in a rank


def play_scenes(rank: int, scenes: list[Scene], directory: Path) -> list[Played]:
    return [Player(rank, scene, directory / str(at)).play() for at, scene in enumerate(scenes)]


class Player:
    """One rank in one scene."""

    def __init__(self, rank: int, scene: Scene, pid_file: Path) -> None:
        self.rank = rank
        self.scene = scene
        self.fault = scene.fault
        self.pid_file = pid_file
        self.played = Played()
        self.bench = Bench()
        self.kernels = [self._kernel(at, kernel) for at, kernel in enumerate(scene.kernels)]
        self.tuned = tune(self.bench, self._thunk, **scene.options)

    def play(self) -> Played:
        fault = self.fault
        if not self.scene.has_config:
            self._call()
        elif fault is None:
            self._call()
            self._call()
        elif fault.kind == "absent":
            self._call()
            self.played.fault_call = 1
            self._leave_out_a_call(anew=bool(fault.at_run % 2))
            self._call()
        else:
            while self.played.runs < fault.at_run:
                self._call()
            self.played.fault_call = len(self.played.calls) - 1
            self._go_on()
        self._note_winners()
        return self.played

    def _go_on(self) -> None:
        """Call again when the fault has happened."""
        assert self.fault is not None
        others = [rank for rank in range(self.scene.world_size) if rank != self.fault.rank]
        if self.fault.kind in ("kill", "quit"):
            meet(*others)
            self._call(SHORT_S)  # who has gone is named again
            return
        if self.fault.kind == "stop":
            if self.rank in others:
                meet(*others)
            if self.rank == others[0]:
                os.kill(int(self.pid_file.read_text()), signal.SIGCONT)
            meet()
        set_patience(self.tuned, TIMEOUT_S)
        for _ in range(LAST_CALLS.get(self.fault.kind, 1)):
            self._call()

    def _leave_out_a_call(self, *, anew: bool) -> None:
        assert self.fault is not None
        if anew:
            self.tuned.retune()
        meet()
        if self.rank != self.fault.rank:
            self._call(SHORT_S)
        meet()
        if self.rank == self.fault.rank:
            self._call()  # learns that it was given up

    def _call(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            set_patience(self.tuned, timeout_s)
        began, exchanges = time.monotonic(), self._exchanges()
        error, text = "", ""
        try:
            assert self.tuned() == self.played.runs, "not the last run's result"
        except BaseException as caught:
            error, text = type(caught).__name__, str(caught)
            if isinstance(caught, (AssertionError, SystemExit)) and not self._is_own(caught):
                raise
        seconds, allowed_s = time.monotonic() - began, self.tuned._calls.state.function.timeout_s
        assert is_outside(), "a call has no end"
        assert not is_tuning()
        self.played.calls.append(Call(error, text, seconds, allowed_s, self._exchanges() == exchanges))
        set_patience(self.tuned, TIMEOUT_S)
        if error == "SystemExit" and self.fault is not None and self.fault.kind == "quit":
            sys.exit(3)

    def _exchanges(self) -> int:
        calls = self.tuned._calls
        return -1 if calls is None or calls.state is None else calls.state.function.group._sequence

    def _is_own(self, error: BaseException) -> bool:
        return isinstance(error, SystemExit) and self.fault is not None and self.fault.rank == self.rank

    def _kernel(self, at: int, kernel: Kernel) -> Any:
        def fails(*named: Any) -> None:
            raise out_of_resources()

        failures = {block: how for (rank, block), how in kernel.failures.items() if rank == self.rank}
        made = self.bench.kernel(
            {block: kernel.ms[self.rank, block] for block in kernel.candidates[self.rank]},
            FUNCTIONS[at],
            pre_hooks={block: fails for block, how in failures.items() if how == "hook"},
            interpreted=self.scene.is_interpreted,
        )
        made.fn.failures = {block: out_of_resources for block, how in failures.items() if how != "hook"}
        return made

    def _thunk(self) -> int:
        self.played.runs += 1
        run = self.played.runs
        time.sleep(self.scene.delays.get((self.rank, run), 0.0))
        fails = self.fault is not None and run == self.fault.at_run and self.fault.kind != "absent"
        for at, (kernel, made) in enumerate(zip(self.scene.kernels, self.kernels, strict=True)):
            for n, pattern in kernel.launches[self.rank]:
                for _ in range(pattern.launches(run)):
                    x = numbers(n)
                    wanted = x + 1 if FUNCTIONS[at] is add else x * 2
                    assert torch.equal(launch(made, x), wanted), "a launch has computed something wrong"
            if fails and at == 0:
                self._fail()
        return run

    def _fail(self) -> None:
        fault = self.fault
        assert fault is not None
        if fault.kind in ("stop", "kill"):  # the others are to come to the exchange at the same time
            meet()
            set_patience(self.tuned, SHORT_S)
            others = [rank for rank in range(self.scene.world_size) if rank != fault.rank]
            if self.rank != fault.rank:
                if fault.kind == "stop":
                    wait_for(self.pid_file.exists)
                meet(*others)
                return
        if self.rank != fault.rank:
            return
        if fault.kind == "raise":
            raise Boom("of this scene")
        if fault.kind in ("exit", "quit"):
            sys.exit(3)
        if fault.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(TIMEOUT_S)  # the handler runs in between
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            self.pid_file.with_suffix(".part").write_text(str(os.getpid()))
            self.pid_file.with_suffix(".part").replace(self.pid_file)
            os.kill(os.getpid(), signal.SIGSTOP)

    def _note_winners(self) -> None:
        report = self.tuned.report
        self.played.report_runs = report.runs
        if self.played.calls[-1].error:
            return
        for context in report.contexts:
            block = context.config.kwargs["BLOCK"]
            self.played.winners[context.kernel, context.key[0]] = (block, context.status)


# ---- in the parent


def check_scene(scene: Scene, at: int, results: list[Result]) -> None:
    """Raise AssertionError unless every rank has ended as it should."""
    fault = scene.fault
    gone = fault.rank if fault is not None and scene.is_deadly else None
    for result in results:
        if result.rank == gone:
            assert fault is not None
            ended = result.signal == signal.SIGKILL if fault.kind == "kill" else result.exitcode == 3
            assert ended, describe(result)
            assert not result.timed_out, describe(result)
        else:
            assert result.ok, describe(result)
    played = {result.rank: result.value[at] for result in results if result.rank != gone}
    for rank, own in played.items():
        _check_calls(scene, rank, own)
    first = next(iter(played.values()))
    for rank, own in played.items():
        assert own.report_runs == first.report_runs, (
            f"rank {rank}: {own.report_runs} runs of the last session"
        )
        assert own.runs == first.runs, f"rank {rank}: {own.runs} runs"
    if scene.has_config and gone is None:
        for rank, own in played.items():
            _check_winners(scene, rank, own)


def _check_calls(scene: Scene, rank: int, own: Played) -> None:
    fault, calls = scene.fault, own.calls
    for call in calls:
        assert call.seconds < call.timeout_s + BEYOND_S, f"rank {rank}: {call}"
    if not scene.has_config:
        assert calls[0].error in ("NoValidConfig", "PeerHasNoConfig"), f"rank {rank}: {calls}"
        return
    bad = [call for call in calls if call.error]
    if fault is None:
        assert not bad, f"rank {rank}: {bad}"
        return
    if calls[own.fault_call].is_settled:  # it is then a rank's own
        assert [call.error for call in bad] == [OWN.get(fault.kind)] * (
            rank == fault.rank and fault.kind in OWN
        )
        return
    if fault.kind != "stop":  # after that, one or two calls more may end before all are together again
        assert len(bad) == (2 if fault.kind in ("kill", "quit") else 1), f"rank {rank}: {calls}"
        assert scene.is_deadly or not calls[-1].error, f"rank {rank}: {calls[-1]}"
    else:
        assert not calls[-1].error, f"rank {rank}: {calls}"
    _check_error(fault, rank, bad[0])
    for call in bad[1:]:
        assert call.error == "AgreementTimeout", f"rank {rank}: {call}"


def _check_error(fault: Fault, rank: int, call: Call) -> None:
    if rank == fault.rank:
        assert call.error == OWN.get(fault.kind, "AgreementTimeout"), f"rank {rank}: {call}"
    elif fault.kind in (*OWN, "quit"):
        assert call.error == "PeerFailed", f"rank {rank}: {call}"
        assert f"rank {fault.rank} failed" in call.text, call.text
        assert OWN.get(fault.kind, "SystemExit") in call.text, call.text
    else:
        assert call.error == "AgreementTimeout", f"rank {rank}: {call}"
        assert f"for rank {fault.rank} to agree" in call.text, call.text


def _check_winners(scene: Scene, rank: int, own: Played) -> None:
    for at, kernel in enumerate(scene.kernels):
        for n in kernel.keys:
            if rank not in having(kernel, n):
                continue
            if len(kernel.candidates[having(kernel, n)[0]]) == 1:
                continue  # the lowest rank leaves no choice, and so it is not reported
            expected = true_winners(kernel, n, scene.options["rank_reduce"])
            name = FUNCTIONS[at].__name__
            block, status = own.winners[name, n]
            assert status == "tuned", f"rank {rank}, {name}[{n}]: {status}"
            is_exact = scene.options["n_repeat"] is not None and scene.options["objective"] == "kernel"
            if is_exact:
                assert block in expected, f"rank {rank}, {name}[{n}]: {block}, not one of {expected}"
            assert block in viable_blocks(kernel, n), f"rank {rank}, {name}[{n}]: {block} fails somewhere"
