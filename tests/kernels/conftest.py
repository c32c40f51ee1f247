"""What the tests of several operations are given."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def compiler() -> None:
    """Load what `torch.compile` imports, here and not in each rank that is forked: it takes two seconds."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")(torch.ones(2, requires_grad=True))


@pytest.fixture(scope="module")
def narrow_tiles() -> Iterator[None]:
    """Have tiles in the model moved back to any column, for tests whose tiles are a few columns wide."""
    import gluon_model

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gluon_model.load_kernel_module("gemm.problem"), "ALIGNED", 1)
        yield
