"""What the tests of `persistent_matmul` are given."""

import pytest
from gemm_runs import SHARED_BYTES, poison_rooms

from dist_autotune.kernels.gemm import pruning
from dist_autotune.kernels.gemm.configs import PLAIN_CANDIDATES
from dist_autotune.kernels.gemm.operation import plain_gemm


@pytest.fixture(autouse=True)
def one_plain_candidate(monkeypatch):
    """Without tuning: each test chooses what it runs."""
    monkeypatch.setattr(plain_gemm, "configs", PLAIN_CANDIDATES[:1])


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(pruning, "shared_memory_bytes", lambda: SHARED_BYTES)


@pytest.fixture
def poisoned_rooms(monkeypatch):
    """Return the list of all scratch memory, which is full of NaN at first."""
    return poison_rooms(monkeypatch)
