"""By what tensors are looked up, and how much is kept of what was found out about them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_switches import frequent_switches

from dist_autotune.kernels import tensors
from dist_autotune.kernels.tensors import check_distinct, layout_of, remember


def test_a_layout_is_shape_strides_type_device_and_alignment():
    tensor = torch.randn(24, 32)
    for alike in (tensor.detach(), tensor.clone()):
        assert layout_of(tensor) == layout_of(alike)
    rows, beside = tensor[1:23], tensor.as_strided((22, 32), (32, 1), 1)
    assert layout_of(rows) == layout_of(tensor[2:24])
    others = (rows, beside, tensor[:, :8], tensor.T, tensor.view(torch.int32), [tensor], None)
    assert len({layout_of(other) for other in (tensor, *others)}) == 1 + len(others)


def test_elements_of_a_matrix_that_are_one_in_memory_are_found_and_no_others():
    memory = torch.arange(64)
    for rows, columns, down, along in itertools.product(range(4), range(4), range(8), range(8)):
        matrix = memory.as_strided((rows, columns), (down, along))
        if len(set(matrix.flatten().tolist())) == matrix.numel():
            check_distinct("out", matrix)
        else:
            with pytest.raises(ValueError, match=r"out has shape .* and strides .*: elements overlap"):
                check_distinct("out", matrix)


def test_the_oldest_is_forgotten_and_what_is_there_is_replaced(monkeypatch):
    monkeypatch.setattr(tensors, "KEPT", 2)
    known = {}
    for key, value in [("a", 1), ("b", 2), ("b", 3), ("c", 4)]:
        assert remember(known, key, value) == value
    assert known == {"b": 3, "c": 4}


def test_threads_may_keep_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors, "KEPT", 3)
    known = {}
    with frequent_switches(), ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: [remember(known, (n, i), i) for i in range(400)], range(8)))
    assert len(known) == 3
