"""`AllGatherGemm` with a bias and an activation: that every way to a product ends with them.

The specialized consumer's source runs in the model, see `test_ag_gemm_model`, and on GPUs.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from ag_gemm_runs import (
    LANES,
    WAYS,
    WAYS_ON_GPUS,
    begin,
    call_in_lane,
    gathered_by_torch,
    opened,
    poison,
    tensors,
)
from operation_runs import GPU_BACKENDS, assert_cases, device, left_as_before, message_of, values

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import GATED, ONLY_SUMS, Epilogue, result_columns

HALF = torch.float16
ENDINGS = [
    *[(HALF, None), (None, "gelu"), (torch.float32, "silu"), (None, None), (torch.bfloat16, "relu")],
    *[(None, "swiglu"), (HALF, "reglu")],
]


def columns_of(rank: int, activation: str | None) -> int:
    """Return how many columns a rank's weight has: other ones on each, and what gates want."""
    return 16 + 16 * rank if activation in GATED else 20 + 8 * rank


def ending_of(n: int, bias_dtype: torch.dtype | None, activation: str | None) -> Epilogue:
    bias = None if bias_dtype is None else (4 * torch.randn(n, device=device())).to(bias_dtype)
    return Epilogue(bias, activation)


def error_ratio(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> float:
    """Return the largest error against float64 as a multiple of what the arithmetic explains.

    The result is rounded once, by eps of its type (the interpreter truncates bfloat16); sums of K products
    are off by about sqrt(K) float32 eps of their sizes, and no activation has a slope above 1.13. 4 eps of
    float32 are what exp, erf and a division cost. Gate and up are both off, each times what the other is.
    """
    wanted = epilogue.of(a.double() @ weight.double().T)
    largest = (a.double().abs() @ weight.double().abs().T).amax() + 16
    eps = torch.finfo(torch.float32).eps
    slope = 2.2 * largest if epilogue.activation in GATED else 1
    explained = torch.finfo(out.dtype).eps * wanted.abs() + (4 + a.shape[1] ** 0.5) * eps * largest * slope
    return float(((out.double() - wanted).abs() / explained).nan_to_num(nan=torch.inf).amax())


def compared(op: AllGatherGemm, m: int, n: int, epilogue: Epilogue, lane: str) -> float:
    """Return the error of a call with fresh inputs and an output full of NaN."""
    a_shard, weight = tensors(m, n, op.shard.shape[1], op.shard.dtype)
    full = gathered_by_torch(a_shard)
    shape = full.shape[0], result_columns(epilogue.activation, n)
    out = torch.full(shape, float("nan"), dtype=a_shard.dtype, device=a_shard.device)
    assert call_in_lane(op, a_shard, weight, out, epilogue, lane) is out
    return error_ratio(out, full, weight, epilogue)


def every_ending(rank, way, lane, dtype):
    """Each rank has columns and an ending of its own; one of them has none."""
    begin(rank)
    errors = {}
    with opened(19, 24, dtype, lane, **WAYS[way]) as op:
        poison(op)
        for i in range(len(ENDINGS)):
            ending = ENDINGS[(i + rank) % len(ENDINGS)]
            n = columns_of(rank, ending[1])
            epilogue = ending_of(n, *ending)
            errors[ending] = compared(op, (19, 7)[i % 2], n, epilogue, lane)
    return errors


CALLS = [*((3, way, "pull", HALF) for way in WAYS), (2, "plain", "push", torch.bfloat16)]
CALLS += [(2, "plain", "as captured", HALF), (2, "matmul", "push", HALF), (2, "matmul", "as captured", HALF)]
CALLS += [(1, "plain", "pull", HALF), (1, "matmul", "pull", torch.bfloat16)]


@pytest.mark.parametrize(("world", "way", "lane", "dtype"), CALLS, ids=str)
def test_every_way_ends_with_each_rank_s_own_epilogue(world, way, lane, dtype):
    for errors in values(every_ending, world, way, lane, dtype):
        assert len(errors) == len(ENDINGS)
        assert {case: error for case, error in errors.items() if not error < 1} == {}


def rounded_once(rank, way, lane):
    bias = torch.full((16,), -65535.0)
    with opened(8, 1, HALF, lane, **WAYS[way]) as op:
        out = torch.empty(8 * op.world_size, 16, dtype=HALF)
        large = torch.full((16, 1), 256.0, dtype=HALF)
        return bool((call_in_lane(op, large[:8], large, out, Epilogue(bias), lane) == 1).all())


def rounded(rank):
    begin(rank)
    ways = itertools.product(WAYS, LANES)
    return {f"{way}, {lane}": lambda way=way, lane=lane: rounded_once(rank, way, lane) for way, lane in ways}


def test_the_sums_are_rounded_once_behind_the_epilogue():
    """65536 alone is no float16."""
    assert_cases(rounded, 2)


# ---- one rank, in this process


@pytest.fixture(params=WAYS)
def op(request):
    with left_as_before(all_gather_gemm), opened(16, 24, HALF, "pull", **WAYS[request.param]) as opened_one:
        all_gather_gemm.configs = CANDIDATES[:1]
        yield opened_one


def test_calls_in_the_same_places_with_other_endings_are_each_their_own(op):
    a_shard, weight = tensors(16, 20, 24, HALF)
    out, bias = torch.empty(16, 20, dtype=HALF), torch.randn(20).to(HALF)
    endings = [ONLY_SUMS, Epilogue(bias), Epilogue(activation="gelu"), Epilogue(bias, "gelu"), ONLY_SUMS]
    for epilogue in endings * 2:
        bias.normal_()  # what is known of a bias is its place alone
        call_in_lane(op, a_shard, weight, out, epilogue, "pull")
        assert error_ratio(out, a_shard, weight, epilogue) < 1
        returned = op(a_shard, weight, bias=epilogue.bias, activation=epilogue.activation)
        assert torch.equal(returned, out)


def test_calls_with_different_epilogues_share_no_winner(monkeypatch):
    monkeypatch.setattr(all_gather_gemm, "configs", CANDIDATES)
    monkeypatch.setattr(all_gather_gemm, "cache", {})
    a_shard, weight = tensors(64, 64, 32, HALF)
    bias = torch.randn(64)
    endings = [ONLY_SUMS, Epilogue(bias), Epilogue(bias.half()), Epilogue(activation="gelu")]
    out = torch.empty(64, 64, dtype=HALF)
    with opened(64, 32, HALF, "pull", consumer="plain", pieces=1, programs=2) as op:

        @contextual_autotune(n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
        def step():
            for epilogue in endings:
                call_in_lane(op, a_shard, weight, out, epilogue, "pull")
                assert error_ratio(out, a_shard, weight, epilogue) < 1

        step()
    assert len({context.key for context in step.report.contexts}) == len(endings)


# ---- a wrong one


def wrong_on_one_rank(rank, lane):
    """Rank 1 passes what is wrong, then what is right, as rank 0 does at once."""
    begin(rank)
    messages = []
    with opened(8, 24, HALF, lane, consumer="plain") as op:
        a_shard, weight = tensors(8, 20, 24, HALF)
        out = torch.empty(8 * op.world_size, 20, dtype=HALF)
        wrong = [
            {"bias": torch.zeros(21)},
            {"bias": torch.zeros(20).double()},
            {"bias": torch.zeros(40)[::2]},
            {"bias": [0.0] * 20},
            {"bias": torch.zeros(20, requires_grad=True)},
            {"activation": "swish"},
            {"activation": "swiglu"},
        ]
        for options in wrong if rank == 1 else []:
            messages.append(message_of(lambda options=options: op(a_shard, weight, out, **options)))
        dist.barrier()  # rank 0 has made no call, and none was waited for
        epilogue = Epilogue(torch.randn(20), "relu")
        error = compared(op, 8, 20, epilogue, lane)
        return messages, error, op._calls


@pytest.mark.parametrize("lane", ["pull", "push"])
def test_a_wrong_epilogue_raises_before_any_peer_hears_of_the_call(lane):
    (_, error, calls), (messages, error_of_other, calls_of_other) = values(wrong_on_one_rank, 2, lane)
    assert max(error, error_of_other) < 1
    assert calls == calls_of_other
    texts = [
        "ValueError: bias has shape (21,); it must be (20,)",
        "TypeError: bias is torch.float64; it must be one of torch.float16",
        "ValueError: bias has stride 2, not 1",
        "TypeError: bias is a list; it must be a tensor or None",
        "RuntimeError: AllGatherGemm has no backward, but grad is enabled and required by bias",
        "ValueError: there is no activation 'swish'; there are 'relu'",
        "ValueError: activation 'swiglu' takes 8 columns of gate, 8 of up, and so on: a multiple of 16",
    ]
    assert [message[: len(text)] for message, text in zip(messages, texts, strict=True)] == texts


# ---- on GPUs


def eager_and_replayed(rank, way, backend, bias_dtype, activation):
    """Call, capture, and replay with new inputs and another bias; return the errors."""
    torch.manual_seed(1000 + rank)
    order = random.Random(rank)
    specialized.tuned.configs = [order.choice(specialized.CANDIDATES[:5])]
    all_gather_gemm.configs = [order.choice(CANDIDATES)]
    n, errors = (272 if activation in GATED else 264) + 128 * rank, []
    with AllGatherGemm(333, 264, HALF, backend=backend, timeout_s=60.0, **WAYS_ON_GPUS[way]) as op:
        epilogue = ending_of(n, bias_dtype, activation)
        errors += [compared(op, m, n, epilogue, lane) for m in (333, 256) for lane in ("pull", "as captured")]
        a_shard, weight = tensors(256, n, 264, HALF)
        columns = result_columns(activation, n)
        out = torch.empty(256 * op.world_size, columns, dtype=HALF, device=device())
        options = {"bias": epilogue.bias, "activation": activation}
        op(a_shard, weight, out, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            op(a_shard, weight, out, **options)
        for _ in range(5):
            for tensor in filter(torch.is_tensor, (a_shard, weight, epilogue.bias)):
                tensor.normal_()
            out.fill_(float("nan"))
            graph.replay()
            errors.append(error_ratio(out, gathered_by_torch(a_shard), weight, epilogue))
        op.check()
    return errors


def cases_on_gpus(rank, backend):
    endings = [(HALF, "gelu"), (torch.float32, None), (None, "silu"), (HALF, "swiglu")]
    cases = itertools.product(WAYS_ON_GPUS, endings)
    return {
        f"{way}, {ending}": lambda way=way, ending=ending: eager_and_replayed(rank, way, backend, *ending)
        for way, ending in cases
    }


@pytest.mark.gpu(devices=2, seconds=50)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_way_ends_with_its_epilogue_on_gpus_eager_and_replayed(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=300)
