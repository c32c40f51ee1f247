"""Configs sorted by the bits of the function's outputs: who may win, who is banned, what is refused."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from bit_functions import BASE, FAST, SLOW, Function, off_by_one_bit, only_reason, racy, tuned_config
from kernels_for_tests import (
    EMULATIONS,
    accumulate,
    add,
    double,
    entries,
    launch,
    numbers,
    only,
    records,
    winner,
)
from msgspec import structs

from dist_autotune import StepTuner, TuningError, tunable
from dist_autotune.bits import outputs
from dist_autotune.errors import InvalidOption
from dist_autotune.logs.records import Banned, ContextSettled, Merged, Note
from dist_autotune.storage import bundle
from dist_autotune.storage.winners import Winners


@triton.jit
def add_too(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@pytest.fixture(autouse=True)
def another_kernel(monkeypatch):
    monkeypatch.setitem(EMULATIONS, add_too, EMULATIONS[add])


@pytest.mark.parametrize("search", ["exhaustive", "racing"])
def test_a_config_that_changes_a_bit_never_wins(bench, search):
    tuned = bench.tune(Function(bench), bits="same", search=search)
    result = tuned()
    context = only(tuned.report)
    assert winner(context) == SLOW
    assert torch.equal(result, numbers() + 1)
    assert only_reason(context, FAST) == "rank 0: other bits than with the first config, in the result"
    assert context.bit_class == 0
    assert [number for _, number in sorted(context.bit_classes.items())] == [0, 0, 1]
    assert len(context.output_digest) == 32


def test_check_reports_classes_and_restricts_nothing(bench):
    tuned = bench.tune(Function(bench), bits="check")
    tuned()
    context = only(tuned.report)
    assert winner(context) == FAST
    assert context.bit_class == 1
    assert context.banned == {}
    (settled,) = records(ContextSettled)
    assert settled.bit_classes == dict(context.bit_classes)
    assert "3 timed, 0 banned, 2 classes of bits" in Path(".autotune_logs/rank-0.log").read_text()
    assert settled.output_digest == context.output_digest


def test_any_neither_hashes_nor_sorts(bench, monkeypatch):
    monkeypatch.setattr(outputs, "hash_tensor", no_hash)
    tuned = bench.tune(Function(bench), bits="any")
    tuned()
    context = only(tuned.report)
    assert winner(context) == FAST
    assert (context.bit_class, context.bit_classes, context.output_digest) == (None, {}, "")
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


def test_a_config_that_repeats_itself_at_first_is_banned_when_it_does_not(bench):
    seen = itertools.count(1)
    change = {FAST: lambda y: off_by_one_bit(y) if next(seen) == 4 else y}
    tuned = bench.tune(Function(bench, change=change), bits="same", n_repeat=3)
    tuned()
    context = only(tuned.report)
    assert winner(context) == SLOW
    assert "does not repeat itself" in only_reason(context, FAST)
    assert [(ban.config_id, ban.by_rank) for ban in records(Banned)] == [(2, 0)]


def test_a_function_that_does_not_repeat_itself_is_refused_with_the_output_that_differs(bench):
    kernel, count = bench.kernel({BASE: 2.0, FAST: 1.0}), itertools.count()

    def thunk():
        return {"y": launch(kernel, numbers()), "seen": [1, torch.tensor(next(count))]}

    tuned = bench.tune(thunk, bits="same")
    with pytest.raises(
        TuningError, match=r"the result\['seen'\]\[1\] on rank 0.*does not repeat itself.*preserve="
    ):
        tuned()
    assert bench.blocks() == [BASE, BASE]  # no config was blamed

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


def test_options_of_the_host_are_compared_and_their_kernels_tuned_beside_them(bench):
    kernels = {
        "one": Function(bench, {BASE: 2.0, SLOW: 1.5}),
        "other": Function(bench, {BASE: 3.0, SLOW: 0.5, FAST: 0.1}, kernel=add_too),
        "third": Function(bench, {BASE: 0.1, SLOW: 0.1}, kernel=double),
    }
    tuned = bench.tune(lambda: kernels[tunable("way", list(kernels))](), bits="same", search="racing")
    result = tuned()
    assert torch.equal(result, numbers() + 1)
    contexts = {context.kernel: context for context in tuned.report.contexts}
    assert contexts["way"].config == "other"
    assert winner(contexts["add_too"]) == SLOW
    assert only_reason_of(contexts["way"], "third").startswith("rank 0: other bits")


def only_reason_of(context, text):
    (reason,) = [reason for candidate, reason in context.banned.items() if text in candidate]
    return reason


# ---- options


def test_bits_belong_to_replay(bench, monkeypatch):
    with pytest.raises(
        InvalidOption,
        match=r"bits='same' belongs to mode='replay': .* name all that it changes in preserve=",
    ):
        bench.tune(lambda: None, bits="same", mode="online")()
    monkeypatch.setenv("DIST_AUTOTUNE_BITS", "check")
    with pytest.raises(InvalidOption, match="DIST_AUTOTUNE_BITS=check belongs to mode='replay'"):
        bench.tune(lambda: None, mode="online")()
    bench.tune(Function(bench), mode="online", bits="any")()
    with (
        pytest.raises(InvalidOption, match="bits='same' belongs to mode='replay'") as refused,
        StepTuner(bits="same").step(),
    ):
        pass
    assert "Leave out" not in str(refused.value)  # of what nobody wrote
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


@pytest.mark.filterwarnings("error")
def test_state_that_is_not_put_back_is_named_without_advice_that_bits_refuse(bench):
    trained = Training(bench, bench.kernel({BASE: 3.0, FAST: 1.0}))
    tuned = bench.tune(trained.step, bits="check", name="a step that is repeated")
    with pytest.warns(
        UserWarning, match=r"every run is a step. Use preserve=\[model, optimizer\]\."
    ) as warned:
        tuned(numbers())
    assert len(warned) == 1
    assert "have different bits in the result on rank 0" in tuned.report.warning


def test_a_training_loop_uses_what_was_tuned_with_equal_bits(bench, monkeypatch):
    tuned_config(bench, bits="same")
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    monkeypatch.setenv("DIST_AUTOTUNE_BITS", "same")
    bench.forget()
    bench.tune(Function(bench), mode="online")()
    assert bench.blocks() == [SLOW]


# ---- what cache, bundles and logs keep, and who may use it


def test_same_uses_only_results_that_hold_the_first_configs_bits(bench, tmp_cache):
    assert tuned_config(bench, bits="any") == ("tuned", FAST, None)
    assert tuned_config(bench, bits="check") == ("cached", FAST, None)
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    assert tuned_config(bench, bits="any") == ("cached", FAST, None)
    stored = {entry["winner"]: entry for entry in entries(tmp_cache)}
    assert len(stored) == 2
    (same,) = [path for path in tmp_cache.glob("*.json") if json.loads(path.read_text())["bit_class"] == 0]
    assert len(json.loads(same.read_text())["output_digest"]) == 32
    for unknown in (None, 1):
        same.write_text(json.dumps({**json.loads(same.read_text()), "bit_class": unknown}))
        assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)


def test_same_uses_no_result_of_another_order_of_configs(bench, tmp_cache):
    """Another config is the first one then, and class 0 is that of its bits."""
    fast_first = {FAST: 1.0, SLOW: 2.0, BASE: 3.0}
    first_bits = {SLOW: off_by_one_bit, BASE: off_by_one_bit}
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    tuned = bench.tune(Function(bench, fast_first, first_bits), bits="same")
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", FAST)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    assert len(entries(tmp_cache)) == 2


def test_a_first_config_that_alone_has_its_bits_is_kept_and_not_compared_again(bench):
    change = {SLOW: off_by_one_bit, FAST: off_by_one_bit}
    for status in ("tuned", "cached"):
        tuned = bench.tune(Function(bench, change=change), bits="same")
        tuned()
        assert (only(tuned.report).status, winner(only(tuned.report))) == (status, BASE)


def test_what_nobody_looks_into_is_named_in_the_log(bench):
    function = Function(bench)
    tuned = bench.tune(lambda: (function(), object()), bits="same")
    tuned()
    remarks = [note.text for note in records(Note)]
    assert remarks == [
        "bits are not compared of the result[1] (a builtins.object): nobody looks into such objects"
    ]


def test_a_bundle_carries_class_and_digest(bench, tmp_cache, tmp_path):
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    (stored,) = Winners(tmp_cache).entries()
    bundle.write(tmp_path / "bundle.json", [stored], replaces=False)
    for path in tmp_cache.glob("*.json"):
        path.unlink()
    (carried,) = bundle.read(tmp_path / "bundle.json")
    assert (carried.bit_class, carried.output_digest) == (0, stored.output_digest)
    bundle.merge(Winners(tmp_cache), [carried], replaces=False)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    bundle.merge(Winners(tmp_cache), [structs.replace(carried, bit_class=1)], replaces=True)
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)


def test_a_new_key_begins_with_the_first_config_and_not_with_the_nearest_winner(bench):
    function = Function(bench)
    tuned = bench.tune(lambda n: launch(function.kernel, numbers(n)), bits="same")
    tuned(64)
    assert winner(only(tuned.report)) == FAST
    bench.forget()
    tuned(128)
    assert bench.blocks(n=128)[:2] == [BASE, BASE]


def test_same_does_not_take_what_autotuner_cache_holds(bench):
    function = Function(bench)
    free = bench.tune(function, bits="any", cache=False)
    free()
    assert winner(only(free.report)) == FAST
    tuned = bench.tune(function, bits="same", cache=False)
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", SLOW)
