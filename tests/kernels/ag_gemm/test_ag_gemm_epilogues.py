"""`AllGatherGemm` with a bias, an activation, rows in fp8 with scales: each way to a product ends with them.

The specialized consumer's source runs in the model, see `test_ag_gemm_model`, and on GPUs.
"""

import itertools

import pytest
import torch
from dense_runs import GATHERING_ROWS, LANES, WAYS, WAYS_ON_GPUS, call_in_lane, gathered_by_torch, opened
from epilogue_runs import error_ratio, quantized
from operation_runs import GPU_BACKENDS, device, left_as_before, on_ranks, tuned_in_context
from operations import factors

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import GATED, ONLY_SUMS, Epilogue, result_columns

HALF, FP8 = torch.float16, torch.float8_e4m3fn
ENDINGS = [
    *[(HALF, None), (None, "gelu"), (torch.float32, "silu"), (None, None), (torch.bfloat16, "relu")],
    *[(None, "swiglu"), (HALF, "geglu_tanh")],
]


def columns_of(rank: int, activation: str | None) -> int:
    """Return how many columns a rank's weight has: other ones on each, and what gates want."""
    return 16 + 16 * rank if activation in GATED else 20 + 8 * rank


def ending_of(n: int, bias_dtype: torch.dtype | None, activation: str | None) -> Epilogue:
    bias = None if bias_dtype is None else (4 * torch.randn(n, device=device())).to(bias_dtype)
    return Epilogue(bias, activation)


def compared(op: AllGatherGemm, m: int, n: int, epilogue: Epilogue, lane: str = "eager") -> float:
    """Return the error of a call with fresh inputs, in fp8 and their scales, and an output full of NaN."""
    k, dtype, of_all = op.shard.shape[1], op.shard.dtype, epilogue
    if dtype == FP8:
        (a_shard, scale_a), (weight, scale_weight) = quantized(m, k, device()), quantized(n, k, device())
        of_all = epilogue._replace(scale_a=gathered_by_torch(scale_a), scale_b=scale_weight.T)
        epilogue = epilogue._replace(scale_a=scale_a, scale_b=scale_weight)
    else:
        a_shard, weight = factors(m, n, k, dtype)
    full = gathered_by_torch(a_shard)
    shape = full.shape[0], result_columns(epilogue.activation, n)
    out_dtype = torch.bfloat16 if dtype == FP8 else dtype
    out = torch.full(shape, float("nan"), dtype=out_dtype, device=a_shard.device)
    assert call_in_lane(op, a_shard, weight, out, epilogue, lane) is out
    assert torch.equal(op.gathered.view(torch.uint8), full.view(torch.uint8))
    return error_ratio(out, full, weight, of_all)


def every_ending(rank, way, lane, dtype):
    """Each rank has columns and an ending of its own; one of them has none."""
    errors = []
    with opened(19, 48 if dtype == FP8 else 24, dtype, **WAYS[way]) as op:
        GATHERING_ROWS.poison(op)
        for call in range(len(ENDINGS)):
            bias_dtype, activation = ENDINGS[(call + rank) % len(ENDINGS)]
            n = columns_of(rank, activation)
            epilogue = ending_of(n, bias_dtype, activation)
            errors.append(compared(op, (19, 7)[call % 2], n, epilogue, lane))
    return errors


CALLS = {  # by the number of ranks
    1: [("plain", "eager", HALF), ("collective", "eager", torch.bfloat16)],
    2: [
        *((way, lane, FP8) for way, lane in itertools.product(WAYS, LANES)),
        ("plain", "as captured", HALF),
        ("plain", "eager", torch.bfloat16),
    ],
    3: [(way, "eager", HALF) for way in WAYS],
}


@pytest.mark.parametrize("world", CALLS)
@on_ranks()
def test_every_way_ends_with_each_rank_s_own_epilogue_and_scales(rank, world):
    GATHERING_ROWS.begin(rank)
    return {f"{call}": lambda call=call: every_ending(rank, *call) for call in CALLS[world]}


def rounded_once(rank, way, lane):
    bias = torch.full((16,), -65535.0)
    with opened(8, 1, HALF, **WAYS[way]) as op:
        out = torch.empty(8 * op.world_size, 16, dtype=HALF)
        large = torch.full((16, 1), 256.0, dtype=HALF)
        return bool((call_in_lane(op, large[:8], large, out, Epilogue(bias), lane) == 1).all())


@on_ranks(2)
def test_the_sums_are_rounded_once_behind_the_epilogue(rank):
    """65536 alone is no float16."""
    GATHERING_ROWS.begin(rank)
    ways = itertools.product(WAYS, LANES)
    return {f"{way}, {lane}": lambda way=way, lane=lane: rounded_once(rank, way, lane) for way, lane in ways}


def without_scales(rank, way):
    """Rank 1 passes no scales, and again none behind a call with them: its rows count as they are."""
    errors = []
    with opened(16, 32, FP8, **WAYS[way]) as op:
        for passes in (False, True, False):
            (a_shard, scale_a), (weight, _) = quantized(16, 32, device()), quantized(20, 32, device())
            scale_a = scale_a if passes or rank == 0 else None
            out = op(a_shard, weight, scale_a=scale_a)
            scales = gathered_by_torch(torch.ones(16, 1) if scale_a is None else scale_a)
            errors.append(error_ratio(out, gathered_by_torch(a_shard), weight, Epilogue(scale_a=scales)))
    return errors


@on_ranks(2)
def test_rows_of_a_rank_that_passes_no_scales_count_as_they_are(rank):
    GATHERING_ROWS.begin(rank)
    return {way: lambda way=way: without_scales(rank, way) for way in WAYS}


# ---- one rank, in this process


@pytest.fixture(params=WAYS)
def op(request):
    with left_as_before(all_gather_gemm), opened(16, 24, HALF, **WAYS[request.param]) as opened_one:
        all_gather_gemm.configs = CANDIDATES[:1]
        yield opened_one


def test_calls_in_the_same_places_with_other_endings_are_each_their_own(op):
    a_shard, weight = factors(16, 20, 24, HALF)
    out, bias = torch.empty(16, 20, dtype=HALF), torch.randn(20).to(HALF)
    endings = [ONLY_SUMS, Epilogue(bias), Epilogue(activation="gelu"), Epilogue(bias, "gelu"), ONLY_SUMS]
    for epilogue in endings * 2:
        bias.normal_()  # what is known of a bias is its place alone
        call_in_lane(op, a_shard, weight, out, epilogue)
        assert error_ratio(out, a_shard, weight, epilogue) < 1
        returned = op(a_shard, weight, bias=epilogue.bias, activation=epilogue.activation)
        assert torch.equal(returned, out)


def test_calls_with_different_epilogues_share_no_winner(monkeypatch):
    monkeypatch.setattr(all_gather_gemm, "configs", CANDIDATES)
    monkeypatch.setattr(all_gather_gemm, "cache", {})
    a_shard, weight = factors(64, 64, 32, HALF)
    bias = torch.randn(64)
    endings = [ONLY_SUMS, Epilogue(bias), Epilogue(bias.half()), Epilogue(activation="gelu")]
    out = torch.empty(64, 64, dtype=HALF)
    with opened(64, 32, HALF, consumer="plain", pieces=1, programs=2) as op:

        def call(epilogue):
            call_in_lane(op, a_shard, weight, out, epilogue)
            return error_ratio(out, a_shard, weight, epilogue)

        step, errors = tuned_in_context(lambda: max(map(call, endings)))
        step()
    assert max(errors) < 1
    assert len({context.key for context in step.report.contexts}) == len(endings)


# ---- on GPUs


@pytest.mark.gpu(devices=2, seconds=35)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@on_ranks(2, timeout_s=300)
def test_every_way_multiplies_fp8_on_gpus(rank, backend):
    torch.manual_seed(rank)
    specialized.tuned.configs = specialized.CANDIDATES[rank : rank + 1]
    all_gather_gemm.configs = CANDIDATES[rank : rank + 1]

    def errors(way: dict[str, object]) -> list[float]:
        with opened(333, 528, FP8, backend=backend, **way) as op:
            n = 272 + 128 * rank
            endings = {333: (torch.float32, "silu"), 256: (None, None)}
            return [compared(op, m, n, ending_of(n, *ending)) for m, ending in endings.items()]

    return {name: lambda way=way: errors(way) for name, way in WAYS_ON_GPUS.items()}
