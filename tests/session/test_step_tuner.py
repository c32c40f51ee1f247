"""`StepTuner`: a with block is a run, as a call of an online function is."""

import threading

import pytest
import torch
from kernels_for_tests import Mine, is_outside, launch, numbers, only, records, winner

from dist_autotune import StepTuner, is_tuning
from dist_autotune.errors import InvalidOption, TuningError
from dist_autotune.logs.records import RunFailed, SessionOpened


@pytest.fixture
def step_tuner(bench):
    return StepTuner(clock=bench.clock, n_warmup=0, n_repeat=1, progress=False)


def test_a_loop_may_leave_a_step_in_every_way(bench, step_tuner):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def train(x):
        for turn in range(9):
            with step_tuner.step():
                y = launch(kernel, x)
                if turn == 0:
                    continue
                if turn == 1:
                    break
        with step_tuner.step():
            launch(kernel, x)
            return y

    assert torch.equal(train(numbers()), numbers() + 1)
    assert bench.blocks() == [16, 32, 64]
    assert step_tuner.settled


def test_a_session_that_opens_for_a_new_key_waits_for_its_next_launch(bench, step_tuner):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    for number in range(14):
        with step_tuner.step():
            if number % 2:
                launch(kernel, numbers())
    assert step_tuner.settled
    assert winner(only(step_tuner.report)) == 32
    assert len(records(SessionOpened)) == 2  # the first one ends without a launch


def test_a_session_ends_that_waits_for_a_launch_which_does_not_come(bench, step_tuner):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    for number in range(66):
        assert step_tuner.settled == (number == 1)
        with step_tuner.step():
            if number == 1:
                launch(kernel, numbers())
    assert step_tuner.settled


@pytest.mark.parametrize("error", [Mine("mine"), StopIteration(7), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_step_raises_reaches_the_caller_and_a_later_one_makes_that_run_again(bench, step_tuner, error):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    with step_tuner.step():
        launch(kernel, numbers())
    try:
        with step_tuner.step():
            launch(kernel, numbers())
            raise error
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert (is_outside(), is_tuning()) == (True, False)
    assert len(records(RunFailed)) == 1
    with step_tuner.step():
        launch(kernel, numbers())
    assert bench.blocks() == [16, 32, 32]
    assert step_tuner.settled


def test_steps_and_tuned_functions_join_the_run_that_they_lie_in(bench, kernel, step_tuner):
    other = StepTuner(progress=False)

    def launch_in_a_step():
        with other.step():
            return launch(kernel, numbers())

    tuned = bench.tune(launch_in_a_step, name="outer", mode="online")
    tuned(), tuned()
    assert (tuned.settled, other.report) == (True, None)
    inner = bench.tune(lambda: launch(kernel, numbers(8)), name="inner")
    for _ in range(2):
        with step_tuner.step(), other.step():
            inner()
    assert (step_tuner.settled, inner.report, other.report) == (True, None, None)
    assert bench.blocks(n=8) == [32, 16]
    assert [record.thunk for record in records(SessionOpened)] == ["outer", "test_step_tuner.py"]


@pytest.mark.parametrize("is_settled", [False, True], ids=["tuning", "settled"])
def test_a_step_inside_a_step_of_the_same_tuner_is_refused(bench, kernel, step_tuner, is_settled):
    for _ in range(3 * is_settled):
        with step_tuner.step():
            launch(kernel, numbers())
    assert step_tuner.settled == is_settled
    refused = pytest.raises(TuningError, match=r"a step of test_step_tuner\.py begins inside a step of")
    with refused, step_tuner.step(), step_tuner.step():
        pass
    assert is_outside()
    with step_tuner.step():
        assert torch.equal(launch(kernel, numbers()), numbers() + 1)


def on_thread(name, function):
    """Call it on a thread of this name; return what it raised."""
    raised = []

    def call():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, name=name)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return next(iter(raised), None)


@pytest.mark.parametrize("is_settled", [False, True], ids=["tuning", "settled"])
@pytest.mark.parametrize("opener_lives", [True, False], ids=["the opener goes on", "the opener has ended"])
def test_a_step_closed_on_another_thread_is_an_error_and_leaves_nothing_locked(
    bench, kernel, step_tuner, is_settled, opener_lives
):
    def step():
        with step_tuner.step():
            launch(kernel, numbers())

    while is_settled and not step_tuner.settled:
        step()
    opened = step_tuner.step()
    assert opener_lives or on_thread("opener", opened.__enter__) is None
    if opener_lives:
        opened.__enter__()
        launch(kernel, numbers())
    error = on_thread("closer", lambda: opened.__exit__(None, None, None))
    names = "MainThread" if opener_lives else "opener"
    assert isinstance(error, TuningError)
    assert f"a step of test_step_tuner.py was opened on thread {names} and closed on thread closer" in str(
        error
    )
    assert (is_outside(), is_tuning()) == (True, False)
    assert on_thread("another", step) is None
    while not step_tuner.settled:
        step()
    assert winner(only(step_tuner.report)) == 32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "replay"}, "mode='replay': a step cannot be repeated"),
        ({"preserve": [torch.ones(1)]}, "preserve= belongs to mode='replay'"),
        ({"preserved": []}, r"^StepTuner\(\) has no option preserved\. docs/options.md lists all"),
        ({"n_repeats": 3}, r"^StepTuner\(\) has no option n_repeats. Did you mean n_repeat\?"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_used_is_an_error_with_its_value(options, text):
    with pytest.raises(InvalidOption, match=text):
        StepTuner(**options)


def test_a_key_that_is_launched_too_seldom_opens_a_session_ever_less_often(bench, kernel, step_tuner):
    for step in range(1, 501):
        with step_tuner.step():
            launch(kernel, numbers())
            if step % 10 == 0:
                launch(kernel, numbers(96))
    assert len(records(SessionOpened)) <= 1 + 6  # behind launches 1, 2, 4, 8, 16, 32 of 50
    for _ in range(40):  # now it is launched often
        with step_tuner.step():
            launch(kernel, numbers(96))
    assert step_tuner.settled
    assert winner(only(step_tuner.report)) == 32


def test_a_key_that_is_launched_too_seldom_is_named(bench, kernel, step_tuner, caplog):
    def train(*, evaluates: bool) -> None:
        with step_tuner.step():
            launch(kernel, numbers())
            if evaluates:
                launch(kernel, numbers(96))

    for step in range(40):
        train(evaluates=step % 10 == 9)
    title = "add[96, float32, float32]"
    (warning,) = caplog.messages
    assert warning.startswith(f"{title} waits for launches: test_step_tuner.py launches it too seldom")

    evaluate = bench.tune(lambda: launch(kernel, numbers(96)))
    evaluate()
    train(evaluates=True)
    train(evaluates=False)
    assert step_tuner.settled
