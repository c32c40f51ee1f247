"""That no call depends on the modes and defaults of the process: grad, inference, type, device."""

import pytest
import torch
from every_operation import EVERY, WAYS
from operation_runs import on_ranks
from process_defaults import odd_defaults

MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)


@pytest.mark.parametrize(("runs", "options"), WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_calls_in_any_mode_under_any_defaults_follow_opening_and_calls_in_any_other(rank, runs, options):
    errors = []
    for turn in range(len(MODES) if runs in EVERY.values() and not options else 1):
        modes = MODES[turn:] + MODES[:turn]
        with modes[0](), odd_defaults():
            runs.begin(rank)
            op = runs.open(20, 16, **options)
        for mode in modes:
            with mode():
                operands = runs.operands(op, [20, 7], 24)
                out = runs.new_out(op, [20, 7], operands)
                with odd_defaults():
                    runs.call(op, operands, out, [20, 7], told=mode is torch.no_grad)
                errors.append(runs.error_ratio(out, *operands))
        with odd_defaults():
            op.check()
            op.close()
    return errors
