"""What an exchange costs: bytes of a rank grow with contexts, never with ranks."""

import re
from pathlib import Path

import pytest
from kernels_for_tests import Bench, launch, numbers, out_of_resources, records
from rank_programs import tune

from dist_autotune.ranks import group
from ranks import assert_all_ok, run_ranks

HOW_IT_WORKS = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()


def formula(what):
    """Return the coefficients that docs/how-it-works.md states for the payload of an exchange."""
    (text,) = re.findall(rf"^\| {what} \| ([^|]+) \|$", HOW_IT_WORKS, re.MULTILINE)
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("contexts", [1, 6])
def test_the_cost_model_of_the_docs_holds(contexts):
    def program(rank):
        votes, exchange = [], group.ProcessGroup.exchange

        def noting(self, payload, *rest):
            votes.append(len(payload))
            return exchange(self, payload, *rest)

        bench = Bench()
        kernel = bench.kernel(
            {16: 1.2345678901234 + rank, 32: 1.5123456789, 64: 2.1234567890123}
        )  # as measured
        run = kernel.fn.run

        def fails_once(x, y, n, **kwargs):
            if rank and kwargs["BLOCK"] == 32 and n == 8:
                raise out_of_resources()
            return run(x, y, n, **kwargs)

        kernel.fn.run = fails_once
        step = tune(
            bench, lambda: [launch(kernel, numbers(n)) for n in range(8, 8 + contexts)], name="exchange_cost"
        )
        step()
        group.ProcessGroup.exchange = noting
        step()
        return [e.sent_bytes for e in records(rank=rank) if e.event == "exchanged"], votes

    (zero, vote), (one, _) = assert_all_ok(run_ranks(program, 2))
    (opening,) = formula("opening of a session")
    first, per_new, per_candidate = formula("first run")
    run, per_context, per_ban = formula("any other run")
    assert zero[0] == pytest.approx(opening, rel=0.2)
    assert zero[1] == pytest.approx(first + contexts * (per_new + 3 * per_candidate), rel=0.15)
    assert zero[3] == pytest.approx(run + per_context * contexts, rel=0.15)
    assert one[2] == pytest.approx(run + per_context * contexts + per_ban, rel=0.15)  # the ban's run
    assert vote == []  # a settled call without a new key sends nothing
