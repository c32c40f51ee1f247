"""The workspaces of tensor parallelism: how many there are, when they grow and when they are given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from operation_runs import message_of, values
from tp_runs import block, tensor_of, workspaces

from dist_autotune.kernels import tp
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.tp import registry
from dist_autotune.kernels.tp.registry import WORKSPACES

LAYERS = 20


def many_layers(rank):
    """Run pairs of layers forward and backward; return which operations one and all have opened."""
    with workspaces(rank):
        x = tensor_of(rank, 4, 8)
        weights = [
            tensor_of(0, *shape, seed=layer) for layer in range(LAYERS) for shape in ((12, 8), (8, 12))
        ]
        held = []
        for layers in (1, LAYERS):
            result = x
            for layer in range(layers):
                result = block(result, *weights[2 * layer : 2 * layer + 2]) / 100
            result.sum().backward()
            held.append([id(each.operation) for each in WORKSPACES.open.values()])
        return held[0] == held[1], len(held[1])


def test_many_layers_share_one_workspace():
    # One that gathers and one that scatters, forward and backward.
    assert values(many_layers, 2) == [(True, 2)] * 2


def growing(rank):
    with workspaces(rank):
        up = tensor_of(0, 12, 8)
        tp.reserve(8, 8, torch.float32, timeout_s=55.0)
        rows = []
        for m in (4, 5, 6, 7, 40):
            tp.all_gather_matmul(tensor_of(rank, m, 8), up)
            (workspace,) = (w for key, w in WORKSPACES.open.items() if key.kind is registry.AllGatherGemm)
            rows.append((workspace.rows, workspace.timeout_s))
        opened = len(WORKSPACES.open)
        tp.release()
        after = len(WORKSPACES.open)
        tp.release()  # nothing is open
        return rows, opened, after, tp.all_gather_matmul(tensor_of(rank, 4, 8), up).shape


def test_a_workspace_grows_by_half_and_is_given_back_by_release():
    for rows, opened, after, shape in values(growing, 2):
        assert rows == [(4, 55.0), (6, 55.0), (6, 55.0), (9, 55.0), (40, 55.0)]
        assert (opened, after, shape) == (2, 0, (8, 12))


def group_made_anew(rank):
    with workspaces(rank):
        x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8)
        pair = dist.new_group([0, 1])
        first = tp.all_gather_matmul(x, up, pair)
        (key,) = WORKSPACES.open
        WORKSPACES.open[key].group = dist.group.WORLD  # as if a group of that name had been destroyed
        second = tp.all_gather_matmul(x, up, pair)
        tp.release(pair)
        return torch.equal(first, second), len(WORKSPACES.open)


def test_a_group_that_was_made_anew_gets_a_workspace_of_its_own():
    assert values(group_made_anew, 2) == [(True, 0)] * 2


def uneven(rank, kind, rows):
    """Call with other numbers of rows on each rank, of which one has no room for its own."""
    with workspaces(rank):
        up, down = tensor_of(0, 12, 8), tensor_of(0, 8, 12)
        # Rank 1 must grow: it asks before it would meet the other one, so longer than this test lasts.
        tp.reserve(8, 8, torch.float32, timeout_s=(1.5, 600.0)[rank])  # 8 rows of both ranks together
        if kind == "first":
            tp.release()

        def call(number):
            if kind == "scatter":
                return tp.matmul_reduce_scatter(tensor_of(rank, 2 * number, 12), down)
            return tp.all_gather_matmul(tensor_of(rank, number, 8), up)

        text = message_of(lambda: call(rows[rank]))
        message_of(tp.release)
        dist.barrier()  # nobody has left a collective of the group that would meet this one
        shape = tp.all_gather_matmul(tensor_of(rank, 6, 8), up).shape
    return text, shape


@pytest.mark.parametrize("kind", ["gather", "scatter", "first"])
def test_ranks_with_other_rows_across_a_capacity_all_hear_of_it(kind):
    rows = (4, 6)
    (fits, shape), (grows, _) = values(uneven, 2, kind, rows)
    given = "rank 0: 8, rank 1: 12" if kind == "scatter" else "rank 0: 4, rank 1: 6"
    for text in (fits, grows):
        assert text.startswith("ValueError: ")
        assert f"every rank must pass as many rows; {given}" in text
    assert shape == (12, 12)


def given_back(rank):
    """Release one of two widths; then open another in a new group, the one before being gone."""
    with workspaces(rank):
        tp.reserve(8, 8, torch.float32)
        tp.reserve(8, 16, torch.float32)
        tp.release(features=16)
        left = sorted({key.columns for key in WORKSPACES.open})
        pair = dist.new_group([0, 1])
        tp.reserve(8, 24, torch.float32, pair)
        operations = [
            weakref.ref(each.operation) for key, each in WORKSPACES.open.items() if key.columns == 24
        ]
        dist.destroy_process_group(pair)
        tp.reserve(8, 32, torch.float32)
        gc.collect()
        columns = sorted({key.columns for key in WORKSPACES.open})
        return left, columns, [each() is None for each in operations]


def test_workspaces_are_given_back_by_width_and_with_their_group():
    assert values(given_back, 2) == [([8], [8, 32], [True, True])] * 2


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    keys = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(registry, "name_of", lambda group: "g")
    monkeypatch.setattr(registry, "size_of", lambda name: 2)
    monkeypatch.setattr(WORKSPACES, "find", keys.append)
    monkeypatch.setattr(WORKSPACES, "replace", lambda *given: None)
    for device in ("cuda", "cuda:3"):
        tp.reserve(8, 8, torch.float16, device=device)
    assert keys[:2] == keys[2:]
    assert keys[0].device == torch.device("cuda", 3)


def captured(rank):
    """Pretend that a stream is being captured, which the CPU cannot."""
    with workspaces(rank):
        x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8)
        registry._is_capturing = lambda tensor: True
        texts = [message_of(lambda: tp.all_gather_matmul(x, up))]
        tp.reserve(4, 8, torch.float32)  # of both ranks
        texts.append(message_of(lambda: tp.all_gather_matmul(x, up)))
        is_capturing, Operation._is_capturing = Operation._is_capturing, lambda op: True
        tp.all_gather_matmul(x[:2], up)
        registry._is_capturing, Operation._is_capturing = (lambda tensor: False), is_capturing
        grown = tp.all_gather_matmul(x, up)
        kept = [workspace.rows for _, workspace in WORKSPACES.outgrown]
        tp.release()
        return texts, grown.shape, kept, len(WORKSPACES.outgrown)


def test_a_capture_opens_nothing_and_keeps_what_it_uses_until_release():
    told = "RuntimeError: a captured call of 4 rows of 8 features in torch.float32 found "
    for texts, shape, kept, left in values(captured, 2):
        rooms = ("no workspace", "a workspace of 2 rows")
        assert texts == [f"{told}{room}: call once before the capture, or reserve() it" for room in rooms]
        assert (shape, kept, left) == ((8, 12), [2], 0)


def mesh_of_two_dimensions(rank):
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with workspaces(rank):
        text = message_of(lambda: tp.all_gather_matmul(tensor_of(rank, 4, 8), tensor_of(0, 12, 8), mesh))
        shape = tp.all_gather_matmul(tensor_of(rank, 4, 8), tensor_of(0, 12, 8), mesh["tp"]).shape
        tp.release(mesh["tp"])
        of_one = dist.new_group([0])
        outside = message_of(lambda: tp.reserve(4, 8, torch.float32, of_one))
        if rank == 0:
            tp.release(of_one)
    return text, shape, outside


def test_a_mesh_of_one_dimension_is_a_group_and_one_of_two_is_not():
    wrong = "ValueError: the mesh has dimensions ('dp', 'tp'); pass one, mesh['tp']"
    outside = "ValueError: global rank 1 is not a member of the group that was given"
    inside = "nothing was raised"
    assert values(mesh_of_two_dimensions, 2) == [(wrong, (8, 12), inside), (wrong, (8, 12), outside)]
