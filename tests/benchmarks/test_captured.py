"""That a captured call of a benchmark keeps what its graph reads."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch

from benchmarks.common import tuned


class Graph:
    """A graph of nothing: the CPU has none."""

    def replay(self) -> None: ...


class Call:
    """A call with a tensor of its own, of which a graph holds the address."""

    def __init__(self) -> None:
        self.ends = torch.arange(4)

    def __call__(self) -> torch.Tensor:
        return self.ends + 1


def test_a_replay_keeps_the_call_whose_tensors_its_graph_reads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    call = Call()
    ends = weakref.ref(call.ends)
    replay = tuned.capture(call)
    del call
    gc.collect()
    assert ends() is not None
    assert replay().tolist() == [1, 2, 3, 4]
    del replay
    gc.collect()
    assert ends() is None
