"""What the next process finds on disk, what it must not use, and what is never written."""

import pytest
import triton
from kernels_for_tests import KEY, Probe, block_of, double, entries, grid_of, launch, numbers

from dist_autotune import CacheWarning


def test_the_next_start_finds_the_winners(bench, tmp_cache):
    def start():
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        tuned = bench.tune(lambda: [launch(kernel, numbers(n)) for n in (64, 128)])
        tuned()
        return kernel, tuned.report

    start()
    bench.forget()
    kernel, report = start()
    assert bench.blocks() == [32, 32]
    assert report.runs == 1
    assert [(c.status, block_of(c.config), c.ms) for c in report.contexts] == [("cached", 32, 1.0)] * 2
    assert block_of(kernel.cache[KEY]) == 32
    assert len(entries(tmp_cache)) == 2


def test_a_directory_that_cannot_be_written_is_one_warning_and_tuning_works(bench, kernel, tmp_path):
    (tmp_path / "file").write_text("")
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), cache=tmp_path / "file")
    with pytest.warns(
        CacheWarning, match="Cannot write the cache .* Winners are not kept on disk."
    ) as caught:
        tuned(64)
    assert len(caught) == 1
    for n in (64, 128, 128):  # a second warning would be an error
        tuned(n)
    assert bench.blocks(n=64) == [16, 32, 32, 32]
    assert bench.blocks(n=128) == [32, 32, 16, 32, 32]  # the call that meets it tunes it
    other = bench.kernel({16: 3.0, 32: 1.0}, function=double)
    bench.tune(lambda: launch(other, numbers()), cache=tmp_path / "file")()  # nor does this one warn


@pytest.mark.parametrize(
    "change",
    [{"ms": {16: 3.0, 32: 1.0, 64: 2.0}}, {"function": double}, {"key": ("n", "x_ptr")}],
    ids=["another candidate", "another source", "another key"],
)
def test_an_entry_is_not_used_when_the_kernel_changes(bench, kernel, change):
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    changed = bench.kernel(**{"ms": {16: 3.0, 32: 1.0}, **change})
    if "key" in change:
        changed.keys = ["n", "n"]  # as a list of keys it is another, as a key it can be hashed
    bench.tune(lambda: launch(changed, numbers()))()
    assert len(bench.blocks()) == len(changed.configs) + 1


@triton.jit
def scaled(x_ptr, y_ptr, n, GROUP: triton.language.constexpr, BLOCK: triton.language.constexpr):
    pass


class Scaled(Probe):
    def run(self, *args, GROUP, **kwargs):
        return Probe(double, "double", self.ms, self.launches).run(*args, **kwargs)


def test_an_entry_holds_for_its_constexpr_arguments_only(bench):
    def start(group):
        bench.forget()
        kernel = bench.kernel({16: 3.0, 32: 1.0}, scaled, name="scaled", probe=Scaled)
        bench.tune(lambda: kernel[grid_of(64)](numbers(), numbers(), 64, GROUP=group))()
        return bench.blocks()

    assert start(8) == [16, 32, 32]
    assert start(4) == [16, 32, 32]
    assert start(8) == [32]
