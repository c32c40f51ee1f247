"""Tasks that take turns, and what the hardware does beside them, for `gluon_model`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ClassVar

import numpy as np


class Deadlock(AssertionError):
    """Nobody can go on."""


class Aborted(BaseException):
    """Ends the tasks that are left when one has failed."""


class Task:
    def __init__(
        self, machine: Machine, name: str, program: int, warps: int, body: Callable[[], None]
    ) -> None:
        self.machine, self.name, self.program, self.warps = machine, name, program, warps
        self.waits_for: Callable[[], bool] | None = None
        self.where = ""
        self.done = False
        self.go = threading.Semaphore(0)
        self.multiplying: list[Callable[[], None]] = []  # wgmma in flight, oldest first
        self.storing: list[Callable[[], None]] = []  # TMA stores that shared memory is read for, oldest first
        self.writing: list[Callable[[], None]] = []  # those that are on their way to memory
        self.plain_stores: list[Callable[[], None]] = []  # until it releases them
        self.unfenced: set[int] = set()  # memory that this task has touched since its last proxy fence
        self.acquired: dict[int, int] = {}  # what it has read with acquire semantics, by the word's address
        self.visible: dict[int, int] = {}  # and of that, what precedes its last proxy fence of global memory
        self.acquired_at = -1  # the turn of its last acquire
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)

    def _run(self, body: Callable[[], None]) -> None:
        self.go.acquire()
        try:
            if not self.machine.failure:
                body()
                assert not self.storing, f"{self.name} ends with stores in flight"
                assert not self.multiplying, f"{self.name} ends with products in flight"
        except Aborted:
            pass
        except BaseException as error:
            self.machine.failure = self.machine.failure or error
        self.done = True
        self.machine.back.release()

    def pause(self, condition: Callable[[], bool] | None = None, where: str = "") -> None:
        """Let others run; return when it is this task's turn again and the condition holds."""
        self.waits_for, self.where = condition, where
        self.machine.back.release()
        self.go.acquire()
        self.waits_for = None
        if self.machine.failure:
            raise Aborted

    def order(self, semantics: str) -> None:
        """Take note of what others have published."""
        if "acq" in semantics:
            self.acquired_at = self.machine.turns

    def can_run(self) -> bool:
        return not self.done and (self.waits_for is None or self.waits_for())


class Machine:
    """All tasks of one launch, and the asynchronous operations that they have started."""

    running: ClassVar[Machine | None] = None

    def __init__(self, seed: int, haste: float | None = None) -> None:
        self.random = random.Random(seed)
        self.haste = haste  # how likely the hardware goes on before a task; None: each thing is as likely
        self.tasks: list[Task] = []
        self.copies: list[Callable[[], None]] = []  # TMA loads in flight
        self.queues: dict[int, list[Callable[[], None]]] = {}  # tcgen05 of each program, in order
        self.failure: BaseException | None = None
        self.back = threading.Semaphore(0)
        self.now: Task | None = None
        self.programs = 1
        self.turns = 0  # the clock
        self.published: dict[int, np.ndarray] = {}  # of shared arrays, when each element was

    def start(self, name: str, program: int, warps: int, body: Callable[[], None]) -> None:
        task = Task(self, name, program, warps, body)
        self.tasks.append(task)
        task.thread.start()

    def must_be_running(self, program: int) -> None:
        ended = all(task.done for task in self.tasks if task.program == program)
        assert not ended, "the memory of a program is used that has ended"

    def run(self) -> None:
        while not self.failure and not all(task.done for task in self.tasks):
            ready = [task for task in self.tasks if task.can_run()]
            operations = self._operations()
            if not ready and not operations:
                self.failure = Deadlock(self._stuck())
                break
            self.turns += 1
            share = len(operations) / (len(ready) + len(operations)) if self.haste is None else self.haste
            if operations and (not ready or self.random.random() < share):
                self.random.choice(operations)()
            else:
                self.now = self.random.choice(ready)
                self.now.go.release()
                self.back.acquire()
        for task in self.tasks:
            while not task.done:
                task.go.release()
                self.back.acquire()
            task.thread.join()
        if self.failure:
            raise self.failure
        assert not self.copies, "loads are under way that nobody waits for"
        for task in self.tasks:
            drain(task.writing, 0)
            drain(task.plain_stores, 0)

    def _operations(self) -> list[Callable[[], None]]:
        """Return what the hardware could do now: any load, the oldest of what happens in order."""
        loads = [lambda copy=copy: (self.copies.remove(copy), copy()) for copy in self.copies]
        ordered = [*self.queues.values()]
        for task in self.tasks:
            ordered += [task.multiplying, task.storing, task.writing, task.plain_stores]
        return loads + [lambda queue=queue: queue.pop(0)() for queue in ordered if queue]

    def _stuck(self) -> str:
        return "; ".join(f"{task.name} waits for {task.where}" for task in self.tasks if not task.done)


def drain(queue: list[Callable[[], None]], left: int) -> None:
    """Finish the oldest of what happens in order, but for so many."""
    while len(queue) > left:
        queue.pop(0)()


def machine() -> Machine:
    """Return the machine that runs just now."""
    assert Machine.running is not None
    return Machine.running


def now() -> Task:
    """Return the task whose turn it is."""
    task = machine().now
    assert task is not None
    return task
