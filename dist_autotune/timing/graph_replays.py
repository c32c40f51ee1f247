"""Replays of a function that is captured into a CUDA graph, as samples of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..triton_api import interception
from .samples import Samples
from .stream_filler import CYCLES_PER_MS

REPLAYS = 5  # timed in a run
FILLER_MS = 0.3  # before each: what the host takes to queue it, so that a short one waits for no host


class GraphReplays:
    """The last captured graph: it shares its memory with the next one, and goes with `close`.

    Without a GPU, and where kernels are interpreted, the function is called in place of a replay.
    """

    def __init__(self) -> None:
        self._graph: Any = None
        self._stream: Any = None
        self._replay: Callable[[], Any] | None = None

    @property
    def has_graph(self) -> bool:
        """Whether a replay launches a graph: it calls no code of the user's."""
        return self._graph is not None

    def capture(self, function: Callable[[], Any]) -> None:
        """Capture a call of the function; raises its errors, and torch's where it cannot be captured."""
        if not torch.cuda.is_available() or interception.is_interpreted():
            self._replay = function
            return
        pool = None if self._graph is None else self._graph.pool()
        graph, self._stream = torch.cuda.CUDAGraph(), self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # others' threads may go on
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that is invalid: the cause is raised
                    graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()
        self._reset()  # the last one has been replayed: its times were read
        self._graph, self._replay = graph, graph.replay

    def replay(self, samples: Samples, put_back: Callable[[], None]) -> None:
        """Replay once, so that the ranks meet, then time further replays.

        put_back: called before each, so that what it changes in place, such as a counter, does not grow.
        """
        replay, self._replay = self._replay, None
        assert replay is not None
        for is_timed in (False, *[True] * REPLAYS):
            put_back()
            if self.has_graph:
                torch.cuda._sleep(int(FILLER_MS * CYCLES_PER_MS))
            mark = samples.start() if is_timed else None
            replay()
            if is_timed:
                samples.stop(mark)

    def close(self) -> None:
        """Give the graph and its memory back."""
        self._replay = None
        if self._graph is not None:
            with contextlib.suppress(RuntimeError):  # a device with an error, which is told elsewhere
                self._reset()
                torch.cuda.empty_cache()

    def _reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()
