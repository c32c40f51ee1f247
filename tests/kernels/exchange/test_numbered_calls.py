"""That call n of a rank meets call n of its peers or nothing, wherever a call of one rank fails.

A rank's results are its own or an error that names the cause, on all ranks, without a wait for a time limit.
"""

import contextlib
import functools
import time
from unittest import mock

import pytest
import torch.distributed as dist
from dense_runs import GATHERING_BY_MAIL, GATHERING_BY_STORES, STORING_SUMS, OneSum
from every_operation import EVERY, EXPERTS, WITH_COLLECTIVES
from expert_runs import STORING_CHOSEN
from operation_runs import delay_tasks, message_of, on_ranks
from rank_programs import wait_for

from dist_autotune.kernels.gemm_ar.ways import WAYS

ROWS, K, N = 8, 16, 16
RIGHT = "nothing was raised"
PROMPT_S = 30.0  # far below the 300 s that a kernel, and 120 s that a test, waits


OPERATIONS = {name: (runs, {}) for name, runs in EVERY.items() if name != "GemmAllReduce"}
OPERATIONS |= {
    f"{name}, by a collective": (runs, {"collective": True}) for name, runs in WITH_COLLECTIVES.items()
}
OPERATIONS |= {"AllGatherGemm, low-latency": (GATHERING_BY_MAIL, {})}
OPERATIONS |= {"AllGatherGemm, by stores": (GATHERING_BY_STORES, {})}
OPERATIONS |= {"GemmReduceScatter, by stores": (STORING_SUMS, {})}
OPERATIONS |= {"MoEReduceScatter, by stores": (STORING_CHOSEN, {})}
OPERATIONS |= {f"GemmAllReduce, {way}": (OneSum(way), {}) for way in (None, *WAYS)}


class Calls:
    """Calls of one operation on this rank, and how each has ended."""

    def __init__(self, rank, world, name):
        self.runs, options = OPERATIONS[name]
        self.rank = rank
        self.runs.begin(rank)
        of_operation, self.of_call = self.runs.sizes(K, N)
        self.op = self.runs.open(ROWS, of_operation, **options)
        each = [[ROWS - call % 2] * world for call in range(6)]  # of one size class
        self.inputs = [(rows, self.runs.operands(self.op, rows, self.of_call)) for rows in each]

    def make(self, *, change=None, told=True):
        """Make a call with fresh inputs; return what it raises, its output and its inputs."""
        rows, operands = self.inputs.pop()
        out = self.runs.new_out(self.op, rows, operands)
        given = operands if change is None else change(operands)
        raised = message_of(lambda: self.runs.call(self.op, given, out, rows, told=told))
        return raised, (out, *operands)

    def error_of(self, made):
        """Return the error of the results, for sums infinite if they differ between ranks; collective."""
        out, *operands = made
        return self.runs.error_ratio(out, *operands)

    def own_error_of(self, made):
        """Return the error of this rank's results, whether or not its peers have theirs; collective."""
        out, *operands = made
        runs = self.runs
        return (runs.own_error_ratio if isinstance(runs, OneSum) else runs.error_ratio)(out, *operands)


def with_wrong_weight(operands):
    first, weight, *others = operands
    return first, weight.double(), *others


WAYS_TO_CALL = [(name, True) for name in OPERATIONS]  # whether it is told the rows of each rank
WAYS_TO_CALL += [(name, False) for name in OPERATIONS if name.split(",")[0] in EXPERTS]


@pytest.mark.parametrize(
    ("name", "told", "world"), [(*way, 2 + number % 2) for number, way in enumerate(WAYS_TO_CALL)]
)
@on_ranks(timeout_s=30.0)
def test_wrong_arguments_fail_that_call_on_all_ranks_and_the_next_is_right(rank, world, name, told):
    calls = Calls(rank, world, name)
    began = time.monotonic()
    with calls.op:
        ended, errors = [], []  # errors: of right calls
        for wrong in ((), (0,), (), (world - 1,), range(world), ()):
            raised, made = calls.make(change=with_wrong_weight if rank in wrong else None, told=told)
            ended.append((wrong, raised))
            if not wrong:
                errors.append(calls.error_of(made))  # collective
    assert time.monotonic() - began < PROMPT_S
    for wrong, raised in ended:
        if not wrong:
            assert raised == RIGHT
        elif rank in wrong:
            assert "weight is torch.float64 on cpu; this operation was opened for torch.float16" in raised
        else:
            assert raised.startswith(
                f"ValueError: {calls.runs.name}, rank {rank}: rank {wrong[0]} refused its"
            )
            assert "weight is torch.float64 on cpu" in raised
    return errors


@pytest.mark.gpu(devices=2, seconds=20)
@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(2, timeout_s=100.0)
def test_so_they_do_on_gpus_where_a_check_behind_the_call_tells(rank, name):
    calls = Calls(rank, 2, name)
    with calls.op:
        assert calls.make()[0] == RIGHT
        told, _ = calls.make(change=with_wrong_weight if rank == 0 else None)
        if told == RIGHT:
            told = message_of(calls.op.check)
        assert "weight is torch.float64" in told
        raised, made = calls.make()
        assert raised == RIGHT
        calls.op.check()
        return [calls.error_of(made)]


class Fault(Exception):
    """What is injected."""


def fails(*_, **__):
    raise Fault("out of memory")


def fails_behind(method):
    def called(*args, **options):
        method(*args, **options)
        fails()

    return called


STEPS = ["agree", "allocate", "exchange", "launch", "behind the launch", "push"]
LATE = "launch, when the peer has its result"  # of ways whose product has sent the rows before
SENDING = ("GemmAllReduce, None", "GemmAllReduce, low-latency")


def break_step(op, step):
    """Return a context in which that step of a call fails."""
    if step == "push":
        return mock.patch.multiple(op._memory, prepare=fails, enqueue=fails, copy=fails)
    if step == LATE:
        peer_has_ended = functools.partial(dist.distributed_c10d._get_default_store().check, [LATE])
        return mock.patch.object(op, "_launch", fails_behind(lambda *_: wait_for(peer_has_ended, PROMPT_S)))
    if step in ("launch", "behind the launch"):
        name = "_launch"
        return mock.patch.object(op, name, fails if step == "launch" else fails_behind(op._launch))
    return mock.patch.object(op, {"allocate": "_allocate_results"}.get(step, f"_{step}"), fails)


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(2, timeout_s=100.0)
def test_a_call_that_fails_on_one_rank_breaks_the_operation_on_all_with_its_cause(rank, name):
    steps = [*STEPS, LATE] if name in SENDING else STEPS
    return {step: lambda step=step: is_broken_by(rank, step, name) for step in steps}


def is_broken_by(rank, step, name):
    """Let the second call fail at that step on rank 0; return True if all calls end as they should.

    A peer that has got all rows of that call before has its result, and raises the cause in the next call.
    """
    calls, ended = Calls(rank, 2, name), []
    op = calls.op
    began = time.monotonic()
    raised, made = calls.make()
    first = raised, calls.error_of(made)
    for call in (2, 3, 4):
        with break_step(op, step) if (rank, call) == (0, 2) else contextlib.nullcontext():
            ended.append(calls.make())
        if (rank, call, step) == (1, 2, LATE):
            dist.distributed_c10d._get_default_store().set(LATE, "")
    closed = message_of(op.close)
    errors = [calls.own_error_of(made) for _, made in ended]  # before all assertions, as it is collective
    took_s = time.monotonic() - began
    told = [raised for raised, _ in ended]
    assert first[0] == RIGHT
    assert first[1] < 1
    of_results = [error for (raised, _), error in zip(ended, errors, strict=True) if raised == RIGHT]
    assert all(error < 1 for error in of_results)
    assert took_s < PROMPT_S
    if {told[0], told[-1]} == {RIGHT}:  # this way has no such step
        assert step in ("push", "launch", "behind the launch")
        assert [*told, closed] == [RIGHT] * 4
        return True
    if rank == 0:
        assert told[0].startswith("Fault: out of memory")
        cause = "rank 0: call 2 was not carried out: Fault("
    else:
        assert step != LATE or told[0] == RIGHT
        cause = "rank 1: call 2 failed on rank 0: Fault("
    for raised in (*told[1:], closed):
        assert raised.startswith(f"RuntimeError: {calls.runs.name}, {cause}")
    return True


class Misfit:
    """An operation that is called with an argument too many, or with none."""

    def __init__(self, op, *, lacks):
        self._op, self._lacks = op, lacks

    def __getattr__(self, name):
        return getattr(self._op, name)

    def __call__(self, *args, **kwargs):
        return self._op() if self._lacks else self._op(*args, unknown=1, **kwargs)


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(2, timeout_s=30.0)
def test_so_do_arguments_that_do_not_fit_the_signature(rank, name):
    calls, ended = Calls(rank, 2, name), []
    with calls.op as op:
        if rank == 0:
            delay_tasks(op, "write_signal", 0.02, lambda _, value: value == 0)  # permits are taken late
        for wrong in (None, 1, 0, None):
            calls.op = Misfit(op, lacks=wrong == 0) if rank == wrong else op
            raised, made = calls.make()
            ended.append(raised)
        assert ended[0] == ended[3] == RIGHT
        error = calls.error_of(made)
    for wrong, text in ((1, "unexpected keyword argument 'unknown'"), (0, "missing ")):
        raised, peers = (
            ended[2 - wrong],
            f"ValueError: {calls.runs.name}, rank {rank}: rank {wrong} refused its",
        )
        assert raised.startswith("TypeError: " if rank == wrong else peers)
        assert text in raised
    return [error]
