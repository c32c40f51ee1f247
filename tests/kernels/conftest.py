"""What the tests of several operations are given."""

import warnings

import pytest


@pytest.fixture(scope="session")
def compiler() -> None:
    """Load what `torch.compile` imports, here and not in each rank that is forked: it takes two seconds."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")(torch.ones(2, requires_grad=True))
