"""The programs on the pages of the operations: two ranks run each, and get what plain torch computes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import blocks, page
from torch.nn.functional import relu, rms_norm
from tp_runs import assert_close, workspaces

from ranks import assert_all_ok, run_ranks

WORLD, TOKENS, K, EXPERTS, TOPK = 2, 16, 32, 4, 2


def run_page(name: str, given: dict[str, Any]) -> dict[str, Any]:
    program, *_ = blocks(page(f"docs/{name}.md"), "python")  # what follows shows parts
    exec(program, given)
    return given


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def summed_part(x: torch.Tensor, rank: int) -> torch.Tensor:
    dist.all_reduce(x)
    return x.chunk(WORLD)[rank]


def run_ag_gemm(rank: int) -> None:
    with workspaces(rank, 0):
        a, weight = torch.randn(TOKENS, K), torch.randn(48, K)
        assert_close(run_page("ag_gemm", {"a": a, "weight": weight})["y"], gathered(a) @ weight.T)


def run_gemm_rs(rank: int) -> None:
    with workspaces(rank, 0):
        a, weight = torch.randn(TOKENS, K), torch.randn(48, K)
        y = run_page("gemm_rs", {"a": a, "weight": weight})["y"]
        assert_close(y, summed_part(a @ weight.T, rank))


def run_gemm_ar(rank: int) -> None:
    with workspaces(rank, 0):
        a, weight = torch.randn(TOKENS, K), torch.randn(48, K)
        residual, norm_weight = torch.ones(TOKENS, 48), torch.full((48,), 2.0)
        given = {"a": a, "weight": weight, "residual": residual, "norm_weight": norm_weight}
        got = run_page("gemm_ar", given)
        sums = a @ weight.T
        dist.all_reduce(sums)
        sums += 1
        assert_close(got["residual"], sums)
        assert_close(got["y"], rms_norm(sums, (48,), norm_weight, 1e-5))


def run_moe(rank: int) -> None:
    with workspaces(rank, 0):
        x_shard, topk_weights = torch.randn(TOKENS, K), torch.rand(TOKENS, TOPK)
        w1, w2 = torch.randn(EXPERTS, 16, K), torch.randn(EXPERTS, K, 16)
        topk_ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
        given = {"tokens_per_rank": TOKENS, "k": K, "dtype": torch.float32, "activation": relu}
        tensors = {"x_shard": x_shard, "w1": w1, "w2": w2, "topk_ids": topk_ids, "topk_weights": topk_weights}
        y = run_page("moe", given | tensors)["y"]
        ids, weights = gathered(topk_ids), gathered(topk_weights)
        hidden = relu(torch.einsum("tk,tjnk->tjn", gathered(x_shard), w1[ids]))
        expected = torch.einsum("tjn,tjkn,tj->tk", hidden, w2[ids], weights)
        assert_close(y, summed_part(expected, rank))


def run_ep(rank: int) -> None:
    x, topk_weights = torch.randn(TOKENS, K), torch.rand(TOKENS, TOPK)
    topk_ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    torch.manual_seed(0)
    weights = torch.randn(EXPERTS, K, K)
    sizes = {"tokens_per_rank": TOKENS, "hidden": K, "experts": EXPERTS, "topk": TOPK, "dtype": torch.float32}
    given = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "weight": weights.chunk(WORLD)[rank]}
    multiply = lambda rows, weight, ends: torch.nn.functional.grouped_mm(rows, weight, offs=ends)  # noqa: E731
    y = run_page("ep", sizes | given | {"multiply": multiply})["y"]
    assert_close(y, torch.einsum("tk,tjkn,tj->tn", x, weights[topk_ids], topk_weights))


OPERATIONS = [run_ag_gemm, run_gemm_rs, run_gemm_ar, run_moe, run_ep]


@pytest.mark.parametrize("run", OPERATIONS, ids=lambda run: run.__name__)
def test_the_program_of_a_page_computes_what_plain_torch_does(run: Any) -> None:
    assert_all_ok(run_ranks(run, WORLD))
