"""A config that cannot be launched is replaced in the same call, banned, and never wins."""

import gc
import weakref

import pytest
import torch
from kernels_for_tests import (
    FAILURES,
    block_of,
    inject,
    is_outside,
    launch,
    numbers,
    only,
    out_of_resources,
    records,
    winner,
)

from dist_autotune import NoValidConfig, TuningError, is_tuning, tunable
from dist_autotune.logs.records import Banned, Note, SessionClosed

every_failure = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
BLOCKS = (16, 32, 64)


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
@every_failure
@pytest.mark.parametrize(
    ("bad", "launched"),
    [(16, [32, 64, 32]), (32, [16, 16, 64, 64]), (64, [16, 32, 16, 32])],
    ids=["first", "middle", "last"],
)
def test_a_config_that_fails_is_replaced_in_the_same_call(bench, where, failure, bad, launched):
    kernel = inject(bench, where, {bad: failure})
    outputs, best = [], []

    def thunk():
        outputs.append(launch(kernel, numbers()))
        best.append(block_of(kernel.best_config))
        return outputs[-1]

    tuned = bench.tune(thunk)
    tuned()
    assert all(torch.equal(y, numbers() + 1) for y in outputs)
    assert bench.blocks() == best == launched
    assert len(outputs) == len(launched) == tuned.report.runs
    times = {block_of(config): ms for config, ms in kernel.configs_timings.items()}
    assert times[bad] == [float("inf")] * 3  # as in stock Triton
    (banned,) = records(Banned)
    assert (banned.run, banned.by_rank, banned.kernel, banned.config) == (
        BLOCKS.index(bad),
        0,
        "add",
        str(kernel.configs[BLOCKS.index(bad)]),
    )
    assert type(failure()).__name__ in banned.reason
    context = only(tuned.report)
    assert block_of(context.config) == launched[-1]
    ((text, reason),) = context.banned.items()
    assert f"BLOCK: {bad}" in text
    assert reason.startswith("rank 0: ")
    assert type(failure()).__name__ in reason
    assert text not in context.timings
    assert block_of(kernel.best_config) == launched[-1]


@pytest.mark.parametrize("objective", ["kernel", "graph"])
def test_a_config_that_fails_when_a_run_is_repeated_is_replaced_and_banned(bench, objective):
    kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})
    fails_from_now_on = lambda: kernel.fn.failures.setdefault(16, out_of_resources)  # noqa: E731
    thunk = lambda: (launch(kernel, numbers()), fails_from_now_on())[0]  # noqa: E731
    tuned = bench.tune(thunk, objective=objective, n_warmup=None, n_repeat=None)
    assert torch.equal(tuned(), numbers() + 1)
    assert winner(only(tuned.report)) == 32
    assert [*only(tuned.report).banned] == [str(kernel.configs[0])]


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
def test_when_all_fail_one_error_names_kernel_key_and_every_reason(bench, where):
    kernel = inject(bench, where, dict.fromkeys(BLOCKS, out_of_resources))
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(NoValidConfig) as caught:
        tuned()
    message = str(caught.value)
    assert message.startswith("add[64, float32, float32]: all 3 configs failed on some rank. ")
    for block in BLOCKS:
        assert f"Rank 0, BLOCK: {block}" in message
    assert message.count("out of resource: shared memory, Required: 262144") == 3
    assert ".." not in message
    assert isinstance(caught.value, TuningError)
    assert is_outside()
    assert not is_tuning()
    assert [(record.outcome, record.warning) for record in records(SessionClosed)] == [("NoValidConfig", "")]


def test_where_only_an_option_launches_what_has_no_config_the_error_names_the_option(bench):
    kernel = inject(bench, "launch", dict.fromkeys(BLOCKS, out_of_resources))

    def thunk():
        return launch(kernel, numbers()) if tunable("way", ["plain", "fast"]) == "fast" else bench.spend(1.0)

    with pytest.raises(NoValidConfig) as caught:
        bench.tune(thunk)()
    (note,) = caught.value.__notes__
    assert note.startswith("tunable('way') gave \"fast\" in this run. Leave that option out where")


def test_a_launch_that_runs_out_of_memory_is_banned_and_its_memory_is_free(bench, kernel):
    workspaces: list[weakref.ref[torch.Tensor]] = []

    def failing():
        workspace = torch.zeros(1000)
        workspaces.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    kernel.fn.failures[32] = failing
    alive = []

    def thunk():
        y = launch(kernel, numbers())
        alive.extend(workspace() is not None for workspace in workspaces)
        return y

    gc.disable()
    try:
        tuned = bench.tune(thunk)
        assert torch.equal(tuned(), numbers() + 1)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)
    assert "OutOfMemoryError" in next(iter(only(tuned.report).banned.values()))


def failing_once(kernel, block: int, error: Exception) -> None:
    """Let the next launch of a config fail, and no other."""
    run, errors = kernel.fn.run, [error]

    def flaky(*args, **kwargs):
        if kwargs["BLOCK"] == block and errors:
            raise errors.pop()
        return run(*args, **kwargs)

    kernel.fn.run = flaky


@pytest.mark.parametrize("mode", ["replay", "online", "cached"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), out_of_resources()], ids=repr
)
def test_a_failure_in_a_settled_launch_replaces_that_launch_only(bench, error, mode, monkeypatch):
    kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online" if mode == "online" else "replay")
    while not tuned.settled:
        tuned()
    if mode == "cached":
        monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
        tuned()
    bench.forget()
    failing_once(kernel, 64, error)
    assert all(torch.equal(tuned(), numbers() + 1) for _ in range(4))
    assert bench.blocks() == [16, 64, 64, 64]
    assert tuned.settled
    assert (winner(only(tuned.report)), only(tuned.report).banned) == (64, {})
    (text,) = [note.text for note in records(Note) if "settled launch" in note.text]
    assert text.startswith("add[64, float32, float32]: BLOCK: 64")
    assert str(error).splitlines()[0] in text
