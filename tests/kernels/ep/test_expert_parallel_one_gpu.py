"""Exchanges in one launch each way, of several ranks at the same time on one GPU."""

import pytest
import torch
from host_as_peer import DEVICE, DTYPE, on_one_gpu
from ranks_on_one_gpu import ranks_of

from dist_autotune.kernels.ep import ExpertParallel
from dist_autotune.kernels.ep.combine_kernels import combine_rows
from dist_autotune.kernels.ep.dispatch_kernels import send_tokens
from dist_autotune.kernels.ep.slots import CANDIDATES

pytestmark = pytest.mark.gpu(alone=True, seconds=20)
TOKENS, HIDDEN, EXPERTS, TOPK = 128, 2048, 32, 8
COUNTS = ((128, 128, 128, 128), (1, 128, 0, 7), (0, 1, 1, 0), (64, 3, 128, 128))  # tokens of each rank
# Of all ranks together so many programs fit the device at once.
FITTING = [config for config in CANDIDATES if config.kwargs["PER_SM"] * config.num_warps <= 16]


class Rank:
    """A rank with its stream and the tensors of its calls.

    scales: torch multiplies rows by a factor of their expert between dispatch and combine. Such a kernel does
    not start on an H200 while programs of eight warps of a peer's combine, on every SM, wait for this rank's.
    """

    def __init__(self, op: ExpertParallel, *, scales: bool) -> None:
        self.scales = scales
        self.op, self.stream, self.tokens = op, torch.cuda.Stream(), 0
        op._launches._sms //= op.world_size
        self.x = torch.empty(TOKENS, HIDDEN, dtype=DTYPE, device=DEVICE)
        self.ids = torch.empty(TOKENS, TOPK, dtype=torch.int64, device=DEVICE)
        self.weights = torch.empty(TOKENS, TOPK, device=DEVICE)

    def refresh(self, tokens: int) -> None:
        self.tokens = tokens
        self.x.normal_()
        self.ids.random_(-1, EXPERTS + 1)  # some are dropped
        self.ids[::3, 1:] = self.ids[::3, :1]  # duplicates
        self.weights.uniform_()

    def dispatch(self) -> None:
        self.d = self.op.dispatch(self.x[: self.tokens], self.ids[: self.tokens])

    def combine(self) -> None:
        d, own, rows = self.d, EXPERTS // self.op.world_size, self.d.rows
        if self.scales:
            expert = torch.bucketize(torch.arange(len(rows), device=DEVICE), d.offsets[1:], right=True)
            rows = rows * ((self.op.rank * own + expert) % 4 + 1)[:, None].to(DTYPE)
        self.y = self.op.combine(rows, d, self.weights[: self.tokens])

    def check(self, ranks: list["Rank"]) -> None:
        """Assert what this rank has got from all of them."""
        own = EXPERTS // len(ranks)
        chosen = torch.cat([each.ids[: each.tokens] for each in ranks])
        found = [
            (chosen == expert).nonzero()[:, 0]
            for expert in range(self.op.rank * own, (self.op.rank + 1) * own)
        ]
        ends = torch.tensor([0, *(len(each) for each in found)]).cumsum(0)
        assert self.d.offsets.tolist() == ends.tolist()
        rows = torch.cat([each.x[: each.tokens] for each in ranks])[torch.cat(found)]
        assert torch.equal(self.d.rows[: len(rows)], rows)
        ids = self.ids[: self.tokens]
        weights = self.weights[: self.tokens] * (ids % 4 + 1 if self.scales else 1)
        factors = torch.where((ids >= 0) & (ids < EXPERTS), weights, 0)
        want = factors.sum(1)[:, None] * self.x[: self.tokens].float()
        torch.testing.assert_close(self.y.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world", [2, 4])
@on_one_gpu
def test_few_tokens_come_and_go_in_one_launch_each_way(rank: int, world: int, captured: bool) -> None:
    for config in FITTING:
        for kernel in (send_tokens, combine_rows):
            kernel.configs, kernel.cache = [config], {}
        sizes = (TOKENS, HIDDEN, EXPERTS, TOPK)
        with ranks_of(world, ExpertParallel, *sizes, DTYPE, one_launch=True) as ops:
            ranks = [Rank(op, scales=config.num_warps == 4) for op in ops]
            for turn, counts in enumerate(COUNTS):
                _round_trips(ranks, turn, counts, captured=captured)


def _round_trips(ranks: list[Rank], turn: int, counts: tuple[int, ...], *, captured: bool) -> None:
    """Make some with new inputs, back to back; the ranks launch theirs by turns."""
    order = [(place + turn) % len(ranks) for place in range(len(ranks))]

    def eager(*, waits: bool) -> None:
        for step in (Rank.dispatch, Rank.combine):
            for at in order:
                with torch.cuda.stream(ranks[at].stream):
                    step(ranks[at])
            if waits:  # before the next is loaded: for that the driver may wait for all that is enqueued
                torch.cuda.synchronize()

    def refresh() -> None:
        for each, tokens in zip(ranks, counts, strict=False):
            each.refresh(tokens)
        torch.cuda.synchronize()

    refresh()
    eager(waits=True)
    graphs = [torch.cuda.CUDAGraph() for _ in ranks] if captured else []
    for each, graph in zip(ranks, graphs, strict=False):
        with torch.cuda.graph(graph, stream=each.stream, capture_error_mode="thread_local"):
            each.dispatch()
            each.combine()
    for _ in range(3):
        refresh()
        for at in order if captured else ():
            with torch.cuda.stream(ranks[at].stream):
                graphs[at].replay()
        if not captured:
            eager(waits=False)
        for each in ranks:
            each.op.check()
        for each in ranks:
            each.check(ranks)
