"""Names that are the same text on every rank and in every process, or an error that says why not."""

import enum
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernels_for_tests import Bench

from dist_autotune.errors import TuningError
from dist_autotune.triton_api.identity import config_digest, kernel_identity, kernel_source, key_text
from dist_autotune.triton_api.launch import key_of


class Layout(enum.Enum):
    ROW = 0
    COLUMN = 1


@dataclass(frozen=True)
class Shape:
    m: int
    n: int


class Plain:
    """Its repr holds an address."""


# ---- keys


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((), ""),
        ((64, "fp16"), "64, 'fp16'"),
        ((None,), "None"),
        ((True,), "1"),
        ((1.0,), "1"),
        ((0.5,), "0.5"),
        ((-0.0,), "0"),
        ((float("nan"),), "nan"),
        ((np.int64(64),), "64"),
        ((np.float32(0.5),), "0.5"),
        ((Fraction(1, 2),), "0.5"),
        ((2**80,), str(2**80)),
        ((torch.float16,), "torch.float16"),
        ((torch.Size([2, 3]),), "(2, 3)"),
        (((1, (True, None)),), "(1, (1, None))"),
        ((torch.device("cpu"),), "device(type='cpu')"),
        ((Layout.ROW,), "Layout.ROW"),
        ((enum.Flag("Bits", "A B")(0),), "Bits.0"),
        ((Shape(1, 2),), "Shape(m=1, n=2)"),
        ((tl.constexpr(32),), "32"),
        ((tl.float16,), "triton.language.float16"),
        pytest.param((frozenset("ba"),), "{'a', 'b'}", id="frozenset"),  # without an order of its own
    ],
    ids=str,
)
def test_a_key_has_one_text(key, text):
    assert key_text(key) == text


@pytest.mark.parametrize(
    "value",
    [Plain(), object(), lambda x: x, [Plain()], torch.zeros(2)],
    ids=["instance", "object", "lambda", "inside a list", "tensor"],
)
def test_a_value_without_a_text_of_its_own_is_an_error_not_a_silent_key_of_each_rank(value):
    if callable(value):
        assert "0x" not in key_text((value,))
        return
    with pytest.raises(TuningError, match="cannot have this tuning key"):
        key_text((value,))


PRINTS_TEXTS = """
import enum, torch, numpy as np
from dist_autotune.triton_api.identity import candidate_digest, key_text
key = (None, True, 2.5, np.int64(3), torch.bfloat16, 'x', frozenset('abcdef'), (1, 'y'))
print(key_text(key))
print(candidate_digest({'B': 16, 'A': [1, 2], 'num_warps': 4, 'opts': {'y': 1, 'x': {'b', 'a'}}}))
"""


def test_texts_are_the_same_in_another_process(capsys):
    exec(PRINTS_TEXTS, {})
    here = capsys.readouterr().out
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PRINTS_TEXTS]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there == here


# ---- the key that stock Triton computes


def stock_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key under which stock Triton looks for this launch."""
    missed = []

    class Watching(dict):
        def __contains__(self, key):
            missed.append(key)
            return True

        def __getitem__(self, key):
            return kernel.configs[0]

    kernel.cache = Watching()
    kernel.run(*args, grid=(1,), warmup=True, **kwargs)
    return missed[0]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("x", "y", 64), {}),
        (("x",), {"n": 64, "y_ptr": "y"}),
        ((), {"n": 64, "y_ptr": "y", "x_ptr": "x"}),
        (("x", "y"), {"n": np.int64(64)}),
        (("x", "y", None), {}),
        (("x", "y", True), {"none_of_the_parameters": "x"}),
        (("x", "y"), {}),
    ],
    ids=["positional", "mixed", "by keyword", "numpy", "None", "unknown keyword", "left to its default"],
)
def test_the_key_is_the_one_stock_triton_computes(args, kwargs):
    x, y = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
    by_name = {"x": x, "y": y}
    args = tuple(by_name.get(a, a) if isinstance(a, str) else a for a in args)
    kwargs = {k: by_name.get(v, v) if isinstance(v, str) else v for k, v in kwargs.items()}
    kernel = Bench().kernel({16: 1.0, 32: 1.0}, key=("n",))
    assert key_of(kernel, args, kwargs) == stock_key(kernel, args, kwargs)


# ---- the source of kernels

MODULE = """
import triton
import triton.language as tl

LIMIT = tl.constexpr({limit})
UNUSED = {unused}
SCALE: tl.constexpr = {scale}

@triton.jit
def activation(x):
    return x {helper}

@triton.jit
def outer(x):
    return activation(x)

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    # {comment}
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, outer(tl.load(x_ptr + offs)) * SCALE, mask=offs < LIMIT)

tuned = triton.autotune([triton.Config({{"BLOCK": b}}) for b in {blocks}], ["n"])(kernel)
def one(args):
    return 1

with_heuristics = triton.autotune([triton.Config({{"BLOCK": b}}) for b in {blocks}], ["n"])(
    triton.heuristics({{"n": one}})(kernel)
)
"""
WITH_3_6_AND_3_9 = ["2985b98116490c49", "91d3fadbcd615605", "bc73202d79658b0f"]  # two kernels, a config
DEFAULTS = {"limit": 8, "unused": 1, "scale": 2, "helper": "+ 1", "comment": "", "blocks": (16, 32)}


@pytest.fixture
def module(import_kernels: Callable[[str], ModuleType]) -> Callable[..., ModuleType]:
    """Return what imports the module of kernels with some part changed."""
    return lambda **changes: import_kernels(MODULE.format(**{**DEFAULTS, **changes}))


def test_an_entry_of_another_triton_has_the_digests_of_this_one(module):
    """Or an upgrade would be that of the kernel as well, and none of the old candidates would be found."""
    loaded, config = module(), triton.Config({"BLOCK": 16}, num_warps=2, num_stages=1)
    tuners = loaded.tuned, loaded.with_heuristics
    digests = [*(kernel_identity(tuner).digest for tuner in tuners), config_digest(config)]
    assert digests == WITH_3_6_AND_3_9


@pytest.mark.parametrize(
    ("change", "same_digest", "same_texts"),
    [
        ({"comment": "changed"}, False, False),
        ({"helper": "+ 2"}, False, False),
        ({"limit": 9}, False, True),
        ({"scale": 3}, False, True),
        ({"unused": 2}, True, True),
        ({"blocks": (64,)}, True, True),
        ({}, True, True),
    ],
    ids=[
        "the kernel", "a jit function called by a called one", "a captured constexpr",
        "an annotated constexpr", "a global it does not use", "the configs", "nothing",
    ],
)  # fmt: skip
def test_the_digest_covers_what_the_kernel_is_made_of(module, change, same_digest, same_texts):
    one, other = kernel_source(module().tuned.base_fn), kernel_source(module(**change).tuned.base_fn)
    assert ((one.digest == other.digest), (one.texts == other.texts)) == (same_digest, same_texts)


def test_the_same_source_in_a_module_of_another_name_is_the_same_kernel(module, monkeypatch):
    original = module()
    Path(original.__file__).with_name("vendored.py").write_text(Path(original.__file__).read_text())
    vendored = importlib.import_module("vendored")
    monkeypatch.delitem(sys.modules, "vendored")
    one, other = kernel_identity(original.tuned), kernel_identity(vendored.tuned)
    assert (one.short_name, one.digest) == (other.short_name, other.digest)


def test_a_closure_is_told_apart_by_what_it_captures():
    def make(scale):
        factor = tl.constexpr(scale)

        @triton.jit
        def kernel(x_ptr, BLOCK: tl.constexpr):
            tl.store(x_ptr, tl.load(x_ptr) * factor)

        return kernel.fn

    assert kernel_source(make(2)).digest != kernel_source(make(3)).digest
    assert kernel_source(make(2)).digest == kernel_source(make(2)).digest
    enums = [make(enum.IntEnum("Scale", {"DEFAULT": value}).DEFAULT) for value in (2, 3)]
    assert len({kernel_source(each).digest for each in enums}) == 2


def test_a_helper_in_a_module_of_a_module_counts(module):
    def kernel_with(package):
        def kernel(x):
            return package.inner.activation(x) + package.inner.LIMIT

        return kernel_source(kernel)

    def package(**changes):
        made = ModuleType("package")
        made.inner = module(**changes)
        return made

    plain = kernel_with(package())
    assert kernel_with(package()) == plain
    assert kernel_with(package(helper="+ 2")).texts != plain.texts
    assert kernel_with(package(limit=9)).digest != plain.digest
