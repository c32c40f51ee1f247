"""That graphs read what lives, while memory is freed and allocated between replays."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from operation_runs import device, values

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter

TOKENS, FEATURES, COLUMNS, EXPERTS, TOPK = 512, 512, 640, 8, 2
CANARY, FENCE = 123.0, 4096  # elements in front of a result and behind it
ROUNDS = 20


def randoms(*shape):
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16) / shape[-1] ** 0.5


def skewed(tokens):
    """Choose experts so that the first one has most choices and the last one none."""
    chances = torch.tensor([2.0**-each for each in range(EXPERTS - 1)] + [0.0], device=device())
    return torch.multinomial(chances.expand(tokens, EXPERTS), TOPK)


class Fenced:
    """Room for a result, between canaries."""

    def __init__(self, rows, columns):
        self.memory = torch.full((2 * FENCE + rows * columns,), CANARY, device=device(), dtype=torch.bfloat16)
        self.result = self.memory[FENCE:-FENCE].view(rows, columns)

    def is_whole(self):
        return bool((self.memory[:FENCE] == CANARY).all() and (self.memory[-FENCE:] == CANARY).all())


def calls(world):
    """Return the operations with a call of each and its fenced result; the calls own all other tensors."""
    every = world * TOKENS
    told = [TOKENS] * world
    made = []

    def add(operation, rows, columns, *operands, **options):
        room = Fenced(rows, columns)
        made.append((operation, lambda: operation(*operands, room.result, **options), room))

    tokens, more = randoms(TOKENS, FEATURES), randoms(every, FEATURES)
    weight, of_experts = randoms(COLUMNS, FEATURES), randoms(EXPERTS, COLUMNS, FEATURES)
    add(AllGatherGemm(TOKENS, FEATURES, torch.bfloat16), every, COLUMNS, tokens, weight)
    add(GemmReduceScatter(every, COLUMNS, torch.bfloat16), TOKENS, COLUMNS, more, weight)
    gathering = AllGatherMoE(TOKENS, FEATURES, torch.bfloat16)
    add(gathering, every * TOPK, COLUMNS, tokens, of_experts, skewed(TOKENS), tokens=told)
    scattering = MoEReduceScatter(TOKENS, COLUMNS, torch.bfloat16)
    y, weights = randoms(every * TOPK, FEATURES), torch.rand(TOKENS, TOPK, device=device())
    add(scattering, TOKENS, COLUMNS, y, of_experts, skewed(TOKENS), weights, tokens=told)
    return made


def replayed(rank, world):
    """Return which results changed, in replays between which memory changes hands, and broken fences."""
    torch.manual_seed(rank)
    made, graphs, wrong = calls(world), [], []
    for _, call, room in made:
        call()
        torch.cuda.synchronize()
        wanted = room.result.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        graphs.append((graph, wanted, room))
    for number in range(ROUNDS):
        # Whatever a graph reads that nobody holds lies in blocks like these.
        held = [
            torch.full((size,), -1, device=device(), dtype=torch.int32) for size in (64, 1024, 8192, 1 << 20)
        ]
        del held
        for graph, _, room in graphs:
            room.result.fill_(float("nan"))
            graph.replay()
        if number % 5 == 0:
            torch.cuda.empty_cache()
        for place, (_, wanted, room) in enumerate(graphs):
            if not torch.allclose(room.result.float(), wanted.float(), rtol=2e-2, atol=2e-2):
                wrong.append((number, type(made[place][0]).__name__))
    broken = [type(operation).__name__ for operation, _, room in made if not room.is_whole()]
    if dist.is_initialized():
        dist.barrier()
    del graphs
    for operation, _, _ in made:
        operation.close()
    return wrong, broken


@pytest.mark.gpu
def test_what_a_graph_reads_lives_as_long_as_its_operation():
    assert values(replayed, 1, 1) == [([], [])]


@pytest.mark.gpu(devices=2)
def test_what_graphs_of_two_ranks_read_lives_as_long_as_their_operations():
    assert values(replayed, 2, 2) == [([], [])] * 2
