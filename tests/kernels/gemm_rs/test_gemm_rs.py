"""What is of GemmReduceScatter alone: addends, rows that ranks share out, one launch outside of a tuner, fp8.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_runs import SCATTERING_SUMS
from epilogue_runs import quantized
from operation_runs import GPU_BACKENDS, device, message_of, on_ranks
from operations import HALF, factors, tuned_with_other_row_counts

from dist_autotune.kernels.exchange.operation import DeviceFacts
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_rs import GemmReduceScatter, operation, specialized
from dist_autotune.kernels.gemm_rs.operation import LAUNCHES, ONE_LAUNCH, STORES
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, PlainBody


def by_columns_with_addend(rank, index, n, k, collective):
    """Pass a transposed weight, and on rank 0 an addend; all rows and columns of tiles are ragged."""
    SCATTERING_SUMS.begin(rank, index)
    errors = []
    with GemmReduceScatter(65, n, HALF, collective=collective) as op:  # more rows than the ranks can share
        SCATTERING_SUMS.poison(op)
        for m in (38, 30):
            a, weight = factors(m, n, k, HALF)
            across = weight.T.contiguous().T
            addend = torch.randn(m, n, device=a.device).to(HALF) if rank == 0 or collective else None
            wider = (a, weight) if addend is None else _with_addend(a, weight, addend)
            errors += [SCATTERING_SUMS.error_ratio(op(a, across), a, weight)]
            errors += [SCATTERING_SUMS.error_ratio(op(a, across, addend=addend), *wider)]
    return errors


def _with_addend(a, weight, addend):
    """Return operands whose product is a @ weight.T + addend."""
    ones = torch.eye(addend.shape[1], dtype=addend.dtype, device=addend.device)
    return torch.cat([a, addend], 1), torch.cat([weight, ones], 1)


@on_ranks(2)
def test_a_weight_may_lie_by_columns_and_a_rank_may_add_something(rank):
    places = [(40, 24), (21, 33), (1, 24), (24, 1)]
    cases = [(index, *place, False) for index, place in enumerate(places)]
    cases += [(None, *place, False) for place in places] + [(None, 21, 33, True)]
    return {str(case): lambda case=case: by_columns_with_addend(rank, *case) for case in cases}


@on_ranks(3)
def test_rows_that_the_ranks_cannot_share_are_refused_on_every_rank(rank):
    with GemmReduceScatter(12, 8, HALF) as op:
        told = "ValueError: a has 7 rows, which 3 ranks cannot share evenly; pad it to 9"
        assert message_of(lambda: op(*factors(7, 8, 16, HALF))) == told
        return [SCATTERING_SUMS.call_and_compare(op, [3], 16)]


@on_ranks(3)
def test_with_more_than_two_ranks_a_launch_for_each_chunk_or_one_is_tuned_and_ranks_may_differ(rank):
    """The kernel in plain Triton stands for the one that may be launched in steps."""
    with mock.patch.object(PlainBody, "in_steps", True):
        errors, winners, *_ = tuned_with_other_row_counts(rank, SCATTERING_SUMS)
        assert winners["gemm_rs launches"] in LAUNCHES
        SCATTERING_SUMS.begin(rank)
        with GemmReduceScatter(96, 24, HALF, by_stores=None) as op:
            for call in range(6):
                op._choose_launches = lambda *_, call=call: (*LAUNCHES, STORES[1])[(rank + call) % 3]
                op._layouts.clear()
                errors.append(SCATTERING_SUMS.call_and_compare(op, [32], 16))
    return errors


# ---- in fp8: each rank scales its product by rows and columns, then rounds and sends it

FP8 = torch.float8_e4m3fn


def error_in_fp8(out: torch.Tensor, product: torch.Tensor, of_products: torch.Tensor, k: int) -> float:
    """Return the largest error against float64 as a multiple of what the arithmetic explains.

    product: this rank's part of the sum, scaled; of_products: the same of absolute values. Each part is
    rounded once, by eps of the result's type, and so is the sum. Sums of K products, which are exact, are off
    by sqrt(K) float32 eps of what they are of; Hopper's tensor cores cut off what is behind 13 bits, at each
    of K / 32 instructions.
    """
    everywhere = torch.stack([product, product.abs(), of_products])
    if dist.is_initialized():
        dist.all_reduce(everywhere)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    wanted, of_parts, of_all = everywhere.chunk(world, dim=1)[rank]
    explained = torch.finfo(out.dtype).eps * (wanted.abs() + of_parts)
    explained += (4 + k**0.5) * torch.finfo(torch.float32).eps * of_all
    if out.device.type == "cuda":
        explained += -(-k // 32) * 2**-13 * of_all
    return float(((out.double() - wanted).abs() / explained).nan_to_num(nan=torch.inf).amax())


def compared(
    op: GemmReduceScatter, m: int, k: int, *, by_rows: bool = True, by_columns: bool = True, in_steps=False
) -> float:
    """Return the error of a call with fresh inputs and an output full of NaN."""
    (a, scale_a), (weight, scale_weight) = quantized(m, k, device()), quantized(op._n, k, device())
    scales = (scale_a if by_rows else None, scale_weight[:, 0] if by_columns else None)
    out = torch.full((m // op.world_size, op._n), float("nan"), dtype=op._out_dtype, device=device())
    with mock.patch.object(op, "_in_steps", return_value=in_steps):
        assert op(a, weight, out, scale_a=scales[0], scale_weight=scales[1]) is out
    of_rows = scale_a.double() if by_rows else 1.0
    of_columns = scale_weight.double().T if by_columns else 1.0
    left, right = a.double(), weight.double().T
    sums = (left @ right, left.abs() @ right.abs())
    return error_in_fp8(out, *(each * of_rows * of_columns for each in sums), k)


def every_call(rank, candidate, backend="auto"):
    """Call with ragged rows and columns, K of this rank's own, with and without each scale."""
    SCATTERING_SUMS.begin(rank, candidate)
    k = 48 + 16 * rank
    with GemmReduceScatter(78, 40, FP8, backend=backend, timeout_s=60.0) as op:
        SCATTERING_SUMS.poison(op)
        return [
            compared(op, 74, k),
            compared(op, 38, k, by_columns=False),
            compared(op, 38, k, by_rows=False),
            compared(op, 74, 16, in_steps=device() == "cpu"),
        ]


@on_ranks(2)
def test_each_rank_scales_its_product_before_it_is_rounded_and_sent(rank):
    cases = {f"candidate {i}": lambda i=i: every_call(rank, i) for i in range(len(CANDIDATES))}
    return cases | {"different candidates": lambda: every_call(rank, None)}


class StandIn(PlainBody):
    """The kernel in plain Triton, where the specialised one would be."""

    def __init__(self, operands, held, *, stores=False):
        super().__init__(operands, held, DeviceFacts(), stores=stores)


@on_ranks(2)
def test_fp8_takes_the_specialised_kernel_in_every_way_and_ranks_may_differ(rank):
    errors, offered = [], []

    def choose(name, ways, key):
        offered.append(ways)
        return ways[(len(offered) + rank) % len(ways)]

    stand_in = {"can_run": lambda *_: True, "SpecializedBody": StandIn}
    with mock.patch.multiple(specialized, **stand_in), mock.patch.object(operation, "tunable", choose):
        SCATTERING_SUMS.begin(rank)
        for by_stores in (False, None, True):
            with GemmReduceScatter(78, 40, FP8, by_stores=by_stores) as op:
                for _ in range(4):
                    op._layouts.clear()
                    errors.append(compared(op, 74, 32))
                    assert all(isinstance(layout.body, StandIn) for layout in op._layouts.values())
    assert list(dict.fromkeys(offered)) == [(ONE_LAUNCH, *STORES), STORES]
    return errors


def test_results_are_bf16():
    a, weight = torch.ones(16, 32).to(FP8), torch.ones(20, 32).to(FP8)
    with SCATTERING_SUMS.alone(16, 20, FP8) as op:
        assert torch.equal(op(a, weight), torch.full((16, 20), 32.0, dtype=torch.bfloat16))


# ---- on GPUs


@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@on_ranks(2, timeout_s=240)
def test_every_candidate_multiplies_fp8_on_gpus(rank, backend):
    return {
        f"candidate {index}": lambda index=index: every_call(rank, index, backend)
        for index in range(len(CANDIDATES))
    }


def calls_of_specialized_kernel(rank: int, index: int, by_stores: bool) -> list[float]:
    """Call with ragged rows and columns, by one of the candidates; the peer takes the next."""
    m, n, k = 666, 520, 272 + 16 * rank
    args = {"M": m, "N": n, "K": k, "WORLD": 2, "TENSOR_MEMORY": False, "TRANS_B": True}
    usable = prune_chunks(specialized.CANDIDATES, args)
    specialized.tuned.configs, specialized.tuned.cache = [usable[(index + rank) % len(usable)]], {}
    with GemmReduceScatter(m + 6, n, FP8, timeout_s=60.0, by_stores=by_stores) as op:
        SCATTERING_SUMS.poison(op)
        return [compared(op, m, k), compared(op, m, k, by_rows=False)]


@pytest.mark.gpu(devices=2, seconds=60)
@pytest.mark.parametrize("by_stores", [False, True])
@on_ranks(2, timeout_s=240)
def test_the_specialised_kernel_multiplies_fp8_on_gpus(rank, by_stores):
    return {str(i): lambda i=i: calls_of_specialized_kernel(rank, i, by_stores) for i in (0, 3, 6, 9)}
