"""Winners verified by the bits of the function's outputs: who may win, who is banned, what is refused."""

import itertools
from pathlib import Path

import pytest
import torch
from kernels_for_tests import accumulate, add, double, entries, launch, numbers, only, records, winner

from dist_autotune import StepTuner, TuningError
from dist_autotune.bits import outputs
from dist_autotune.errors import InvalidOption
from dist_autotune.logs.records import ContextSettled, Merged, Note

BASE, SLOW, FAST = 16, 32, 64  # BLOCKs: FAST changes a bit


def off_by_one_bit(y):
    """Add one unit in the last place to one element."""
    y.view(torch.int32)[3] += 1
    return y


class Function:
    """A function of one kernel: its outputs depend on the config as `change` says."""

    def __init__(self, bench, ms=None, change=None):
        self.bench, self.change = bench, {FAST: off_by_one_bit} if change is None else change
        self.kernel = bench.kernel(ms or {BASE: 3.0, SLOW: 2.0, FAST: 1.0})

    def __call__(self):
        y = launch(self.kernel, numbers(), torch.zeros(64))
        return self.change.get(self.bench.launches[-1].block, lambda y: y)(y)


def racy():
    """Return a change that depends on how often it was made."""
    count = itertools.count(1)

    def change(y):
        y[0] = next(count)
        return y

    return change


def only_reason(context, block):
    (reason,) = [reason for text, reason in context.banned.items() if f"BLOCK: {block}" in text]
    return reason


def tuned_config(bench, **options):
    """Return status and winner of a new process, as it were, and whether it leaves the outputs the same."""
    tuned = bench.tune(Function(bench), **options)
    tuned()
    context = only(tuned.report)
    return context.status, winner(context), context.same_bits


def test_check_says_that_outputs_change_and_restricts_nothing(bench):
    tuned = bench.tune(Function(bench), bits="check")
    tuned()
    context = only(tuned.report)
    assert winner(context) == FAST
    assert context.same_bits is False
    assert context.banned == {}
    (settled,) = records(ContextSettled)
    assert settled.same_bits is False
    assert "3 timed, 0 banned, other bits" in Path(".autotune_logs/rank-0.log").read_text()


def test_any_hashes_nothing_and_adds_no_run(bench, monkeypatch):
    monkeypatch.setattr(outputs, "hash_tensor", no_hash)
    tuned = bench.tune(Function(bench), bits="any")
    tuned()
    context = only(tuned.report)
    assert winner(context) == FAST
    assert context.same_bits is None
    assert bench.blocks() == [BASE, SLOW, FAST, FAST]
    assert not [merged for merged in records(Merged) if "bits" in merged.payload]


def no_hash(tensor):
    raise AssertionError("nothing is to be hashed")


# ---- what does not repeat itself, or has nothing to compare


@pytest.mark.parametrize("bits", ["same", "check"])
def test_a_config_that_does_not_repeat_itself_is_banned_in_every_one_of_100_sessions(bench, bits):
    tuned = bench.tune(Function(bench, change={FAST: racy()}), bits=bits, cache=False, log_dir=None)
    for _ in range(100):
        tuned()
        context = only(tuned.report)
        assert winner(context) == SLOW
        assert only_reason(context, FAST).startswith("rank 0: does not repeat itself")
        tuned.retune()


def test_a_function_that_does_not_repeat_itself_is_refused_with_the_output_that_differs(bench):
    kernel, count = bench.kernel({BASE: 2.0, FAST: 1.0}), itertools.count()

    def thunk():
        return {"y": launch(kernel, numbers()), "seen": [1, torch.tensor(next(count))]}

    tuned = bench.tune(thunk, bits="same")
    with pytest.raises(
        TuningError, match=r"the result\['seen'\]\[1\] on rank 0.*does not repeat itself.*preserve="
    ):
        tuned()
    assert bench.blocks() == [BASE, FAST, BASE, BASE]  # no config was blamed

    checked = bench.tune(thunk, bits="check")
    checked()
    assert winner(only(checked.report)) == FAST
    assert only(checked.report).banned == {}
    assert "the result['seen'][1] on rank 0" in checked.report.warning


def test_a_function_without_outputs_is_refused(bench):
    kernel = bench.kernel({BASE: 2.0, FAST: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()).sum().item() and None, bits="same")
    with pytest.raises(TuningError, match="returns no tensor: name in outputs="):
        tuned()


# ---- several kernels


def test_winners_that_change_bits_only_together_are_not_kept_together(bench):
    first, second = (bench.kernel({BASE: 2.0, FAST: 1.0}, kernel) for kernel in (add, double))
    third = bench.kernel({BASE: 4.0, FAST: 1.0, SLOW: 3.0}, accumulate)

    def thunk():
        outputs = [launch(kernel, numbers(), torch.zeros(64)) for kernel in (first, second, third)]
        blocks = [launched.block for launched in bench.launches[-3:]]
        return sum(outputs) + (blocks.count(FAST) > 1)

    tuned = bench.tune(thunk, bits="same")
    result = tuned()
    assert torch.equal(result, 4 * numbers() + 1)
    winners = {context.kernel: winner(context) for context in tuned.report.contexts}
    assert list(winners.values()).count(FAST) == 1
    assert winners["accumulate"] == FAST  # it would lose most
    assert torch.equal(tuned(), result)


# ---- options


def test_bits_belong_to_replay(bench, monkeypatch):
    with pytest.raises(
        InvalidOption,
        match=r"bits='same' belongs to mode='replay': .* name all state that it changes in preserve=",
    ):
        bench.tune(lambda: None, bits="same", mode="online")
    monkeypatch.setenv("DIST_AUTOTUNE_BITS", "check")
    with pytest.raises(InvalidOption, match="DIST_AUTOTUNE_BITS=check belongs to mode='replay'"):
        bench.tune(lambda: None, mode="online")  # where it is decorated, as with `bits=`
    with pytest.raises(InvalidOption, match="DIST_AUTOTUNE_BITS=check compares outputs by repeating a step"):
        StepTuner()
    bench.tune(Function(bench), mode="online", bits="any")()
    with pytest.raises(InvalidOption, match="bits='same' compares outputs by repeating a step") as refused:
        StepTuner(bits="same")
    assert "mode=" not in str(refused.value)  # which nobody wrote
    assert "Decorate a function that makes one step with @contextual_autotune" in str(refused.value)


class Training:
    """A small model with dropout, trained on what a kernel makes of each batch."""

    def __init__(self, bench, kernel, change=None):
        torch.manual_seed(0)
        self.bench, self.kernel, self.change = bench, kernel, change or {}
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self, batch):
        y = launch(self.kernel, batch, torch.zeros_like(batch))
        y = self.change.get(self.bench.launches[-1].block, lambda y: y)(y)
        loss = self.model(y[:64]).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def run(self, step):
        """Return losses and weights; the fourth batch is longer, so a key is new."""
        lengths = [64, 64, 64, 128, 64, 128]
        losses = [step(numbers(n) / (i + 1)) for i, n in enumerate(lengths)]
        return outputs.OutputDigests(
            [losses, self.model.state_dict(), self.optimizer.state_dict()], ()
        ).read()


def test_training_with_equal_bits_is_training_with_the_first_config(bench):
    untuned = Training(bench, bench.kernel({BASE: 3.0}))
    expected = untuned.run(untuned.step)

    kernel = bench.kernel({BASE: 3.0, SLOW: 2.0, FAST: 1.0})
    trained = Training(bench, kernel, {FAST: off_by_one_bit})
    state = [trained.model, trained.optimizer, trained.scheduler]
    tuned = bench.tune(trained.step, bits="same", preserve=state)
    assert trained.run(tuned) == expected
    blocks = [bench.blocks(n=n) for n in (64, 128)]
    assert [(each[-1], FAST in each) for each in blocks] == [(SLOW, True)] * 2  # tuned in the loop

    free = Training(bench, kernel, {FAST: off_by_one_bit})
    state = [free.model, free.optimizer, free.scheduler]
    assert free.run(bench.tune(free.step, bits="any", preserve=state)) != expected


def test_a_training_loop_uses_what_was_tuned_with_equal_bits(bench, monkeypatch):
    tuned_config(bench, bits="same")
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    monkeypatch.setenv("DIST_AUTOTUNE_BITS", "same")
    bench.forget()
    bench.tune(Function(bench), mode="online")()
    assert bench.blocks() == [SLOW]


# ---- what cache, bundles and logs keep, and who may use it


def test_results_of_same_are_entries_of_their_own_and_verified_again(bench, tmp_cache):
    assert tuned_config(bench, bits="any") == ("tuned", FAST, None)
    assert tuned_config(bench, bits="check") == ("cached", FAST, False)
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, True)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, True)
    assert tuned_config(bench, bits="any") == ("cached", FAST, None)
    assert len(entries(tmp_cache)) == 2


def test_a_cached_winner_that_changes_bits_is_not_used_and_its_key_is_tuned_anew(bench):
    """With the configs in another order, another one is the first."""
    fast_first = {FAST: 1.0, SLOW: 2.0, BASE: 3.0}
    first_bits = {SLOW: off_by_one_bit, BASE: off_by_one_bit}
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, True)
    tuned = bench.tune(Function(bench, fast_first, first_bits), bits="same")
    tuned()
    context = only(tuned.report)
    assert (context.status, winner(context), context.same_bits) == ("tuned", FAST, True)
    assert only_reason(context, SLOW) == "rank 0: other bits than with the first config, in the result"


def test_a_session_that_raises_before_winners_are_verified_leaves_none(bench):
    function, calls = Function(bench), itertools.count(1)

    def thunk():
        if next(calls) == 5:  # the first of the runs that verify
            raise ValueError("mine")
        return function()

    tuned = bench.tune(thunk, bits="same")
    with pytest.raises(ValueError, match="mine"):
        tuned()
    assert torch.equal(tuned(), numbers() + 1)
    assert (winner(only(tuned.report)), only(tuned.report).same_bits) == (SLOW, True)


def test_what_nobody_looks_into_is_named_in_the_log(bench):
    function = Function(bench)
    tuned = bench.tune(lambda: (function(), object()), bits="same")
    tuned()
    remarks = [note.text for note in records(Note)]
    assert remarks == [
        "bits are not compared of the result[1] (a builtins.object): nobody looks into such objects"
    ]


def test_a_new_key_begins_with_the_first_config_and_not_with_the_nearest_winner(bench):
    function = Function(bench)
    tuned = bench.tune(lambda n: launch(function.kernel, numbers(n)), bits="same")
    tuned(64)
    assert winner(only(tuned.report)) == FAST
    bench.forget()
    tuned(128)
    assert bench.blocks(n=128)[0] == BASE
