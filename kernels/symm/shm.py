"""Symmetric memory of CPU processes on one host: files that every rank maps."""

from __future__ import annotations

import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .base import SideStream, SymmetricMemory, SymmetricTensor
from .ranks import SharingRanks, SymmetricMemoryError

DIRECTORY = Path("/dev/shm")  # the temporary directory where this is missing
POLL_S = 1e-4  # of a thread that waits for a signal
# Times `timeout_s`. A kernel, here an interpreted one, usually waits as well. It counts polls, so on a busy
# machine it waits longer than its seconds; but it can name the peer, so it is to give up first.
SIGNAL_PATIENCE = 5


class ShmMemory(SymmetricMemory):
    """Files in /dev/shm, or the temporary directory, which are unlinked once every rank has mapped them.

    So no file is left behind, however a rank ends. Processes of different containers cannot use it.
    """

    name = "shm"

    def __init__(self, ranks: SharingRanks, reason: str = "asked for") -> None:
        super().__init__(ranks, torch.device("cpu"), reason)
        self._streams: list[HostStream] = []

    def side_stream(self) -> HostStream:
        self._check_open()
        stream = HostStream(f"side stream of {self._ranks}")
        self._streams.append(stream)
        return stream

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SideStream) -> None:
        _host(stream).enqueue(lambda: dst.copy_(src))

    def write_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        _host(stream).enqueue(lambda: word.fill_(value))

    def wait_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        _host(stream).enqueue(lambda: self._wait(word, value, _host(stream)))

    def abandon(self) -> None:
        super().abandon()
        self._release()

    def _wait(self, word: torch.Tensor, value: int, stream: HostStream) -> None:
        patience_s = SIGNAL_PATIENCE * self._ranks.timeout_s
        deadline = time.monotonic() + patience_s
        while (int(word) - value) % 2**32 >= 2**31:
            if stream.is_closing:
                raise SymmetricMemoryError(
                    f"{self._ranks} closed its memory while a stream waited for a signal"
                )
            if time.monotonic() > deadline:
                waited = f"{self._ranks} waited {patience_s:g} s for a signal to reach {value}"
                raise TimeoutError(f"{waited}; its value is {int(word)}")
            time.sleep(POLL_S)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        path: str | None = None
        error: Exception | None = None
        try:
            path = _new_file(math.prod(shape) * dtype.itemsize)
        except OSError as caught:
            error = caught
        try:
            paths = self._ranks.exchange("naming files", path)
            self._ranks.raise_together(f"creating a file of shape {list(shape)} {dtype}", error)
            with self._ranks.together("mapping the peers' files"):
                peers = tuple(_mapped(peer_path, shape, dtype) for peer_path in paths)
        finally:
            if path is not None:
                os.unlink(path)
        return SymmetricTensor(peers[self.rank], peers)

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.join()

    def _release(self) -> None:
        for stream in self._streams:
            stream.close()


class HostStream:
    """A thread that runs tasks in order, as a CUDA stream does on a GPU.

    Once a task has failed, all later ones are dropped and every `join` raises its error.
    """

    def __init__(self, name: str) -> None:
        self.is_closing = False
        self._error: Exception | None = None
        self._tasks: queue.SimpleQueue[Callable[[], object] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def mark(self) -> threading.Event:
        """Return what is set after all tasks so far, also those that are dropped."""
        done = threading.Event()
        self._tasks.put(done)
        return done

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fork(self) -> None:
        """Nothing to do: the caller's earlier work on the CPU is done."""

    def join(self) -> None:
        self.mark().wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.is_closing = True
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            elif self._error is None:
                try:
                    task()
                except Exception as error:  # raised by `join`
                    self._error = error


def _host(stream: SideStream) -> HostStream:
    assert isinstance(stream, HostStream)
    return stream


def _new_file(size_bytes: int) -> str:
    """Return the path of a new file of zeros, with its space allocated."""
    directory = DIRECTORY if os.access(DIRECTORY, os.W_OK) else Path(tempfile.gettempdir())
    handle, path = tempfile.mkstemp(prefix="symmetric-", dir=directory)
    try:
        # Not ftruncate: without space after it, the first touch of a page would end the process by SIGBUS.
        os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        os.unlink(path)
        raise OSError(
            error.errno, f"no space for {size_bytes} bytes: {error.strerror}", str(directory)
        ) from error
    finally:
        os.close(handle)
    return path


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not os.path.exists(path):  # torch.from_file would create it
        raise OSError(f"{path} of a peer is not here: do the ranks run in different containers?")
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
