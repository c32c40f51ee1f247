"""Options: what cannot be used is an error with the value given and what is needed. Exported names."""

import math

import pytest
import torch

from dist_autotune import TuningError, WallClock, contextual_autotune
from dist_autotune.options import Options


def thunk() -> str:
    return "result"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "batch"}, "mode='batch': expected one of 'replay', 'online'"),
        ({"search": "random"}, "search='random': expected one of 'auto', 'exhaustive', 'racing', 'expected'"),
        ({"objective": "latency"}, "objective='latency'"),
        ({"on_stuck": "ignore"}, "on_stuck='ignore'"),
        ({"n_repeat": 0}, "n_repeat=0: expected an int of at least 1"),
        ({"n_repeat": True}, "n_repeat=True"),
        ({"n_warmup": -1}, "n_warmup=-1: expected an int of at least 0"),
        ({"max_runs": 0}, "max_runs=0"),
        ({"timeout_s": 0}, "timeout_s=0: expected a positive number of seconds"),
        ({"timeout_s": math.inf}, "timeout_s=inf"),
        ({"budget_s": -1.0}, "budget_s=-1.0"),
        ({"clock": object()}, r"has no method start\(\)"),
        ({"clock": WallClock}, r"give a clock, not its class: WallClock\(\)"),
        ({"preserve": "weights"}, "preserve='weights': give a sequence"),
        ({"preserve": torch.zeros(2)}, "give a sequence of tensors"),
        ({"preserve": (torch.zeros(2),), "mode": "online"}, "preserve= belongs to mode='replay'"),
        ({"preserve": (3,)}, "preserve= holds a builtins.int"),
        ({"preserve": (torch.zeros(1).expand(3),)}, r"strides \(0,\): elements overlap"),
        ({"cache": 3}, "cache=3"),
        ({"log_dir": ""}, "log_dir='': give a directory"),
        ({"name": ""}, "name='': give a name"),
        ({"compile_jobs": 0}, "compile_jobs=0: expected an int of at least 1"),
        ({"filler_ms": -1}, "filler_ms=-1: expected milliseconds, from 0 to 1000"),
        *(({"overhead": given}, f"overhead={given!r}: expected ") for given in (0, 1.5, True, "1", math.nan)),
        ({"progress": "yes"}, "progress='yes'"),
        ({"watch": 1}, "watch=1"),
        ({"group": 7}, "group=7: expected a process group, a DeviceMesh, or None"),
        ({"group": torch.ones(2)}, r"group=tensor\(\[1., 1.\]\): expected a process group"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:40] if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_used_is_an_error_where_the_function_is_decorated(options, message):
    with pytest.raises(TuningError, match=message) as caught:
        contextual_autotune(thunk, **options)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option_is_an_error_with_the_nearest_one():
    with pytest.raises(
        TypeError, match=r"contextual_autotune\(\) has no option repeat. Did you mean n_repeat"
    ):
        contextual_autotune(thunk, repeat=3)
    with pytest.raises(TypeError, match=r"^contextual_autotune\(\) takes from 1 to 4 .* but 5 were given"):
        contextual_autotune(thunk, True, 3, 2, "online")


@pytest.mark.parametrize(
    ("options", "search"),
    [
        ({}, "racing"),
        ({"n_repeat": 5}, "exhaustive"),
        ({"n_warmup": 0}, "exhaustive"),
        ({"search": "racing", "n_repeat": 5}, "racing"),
        ({"search": "exhaustive"}, "exhaustive"),
    ],
    ids=["neither count", "n_repeat", "n_warmup", "racing", "exhaustive"],
)
def test_auto_is_exhaustive_when_a_count_is_given(options, search):
    assert Options(**options).search_name == search
