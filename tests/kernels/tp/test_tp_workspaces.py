"""The workspaces of tensor parallelism: how many there are, when they grow and when they are given back."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from operation_runs import message_of
from tp_runs import block, in_workspaces, tensor_of

from dist_autotune.kernels import tp
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.tp import registry
from dist_autotune.kernels.tp.registry import WORKSPACES

LAYERS = 20


@in_workspaces(2)
def test_many_layers_share_one_workspace(rank):
    x = tensor_of(rank, 4, 8)
    weights = [tensor_of(0, *shape, seed=layer) for layer in range(LAYERS) for shape in ((12, 8), (8, 12))]
    held = []
    for layers in (1, LAYERS):
        result = x
        for layer in range(layers):
            result = block(result, *weights[2 * layer : 2 * layer + 2]) / 100
        result.sum().backward()
        held.append([id(each.operation) for each in WORKSPACES.open.values()])
    assert held[0] == held[1]
    assert len(held[1]) == 2


@in_workspaces(2)
def test_a_workspace_grows_by_half_and_is_given_back_by_release(rank):
    up = tensor_of(0, 12, 8)
    tp.reserve(8, 8, torch.float32, timeout_s=55.0)
    for m, rows in {4: 4, 5: 6, 6: 6, 7: 9, 40: 40}.items():
        tp.all_gather_matmul(tensor_of(rank, m, 8), up)
        (workspace,) = (w for key, w in WORKSPACES.open.items() if key.kind is registry.AllGatherGemm)
        assert (workspace.rows, workspace.timeout_s) == (rows, 55.0)
    assert len(WORKSPACES.open) == 2
    tp.release()
    assert len(WORKSPACES.open) == 0
    tp.release()  # nothing is open
    assert tp.all_gather_matmul(tensor_of(rank, 4, 8), up).shape == (8, 12)


@in_workspaces(2)
def test_a_group_that_was_made_anew_gets_a_workspace_of_its_own(rank):
    x, up, pair = tensor_of(rank, 4, 8), tensor_of(0, 12, 8), dist.new_group([0, 1])
    first = tp.all_gather_matmul(x, up, pair)
    (key,) = WORKSPACES.open
    WORKSPACES.open[key].group = dist.group.WORLD  # as if a group of that name had been destroyed
    assert torch.equal(tp.all_gather_matmul(x, up, pair), first)
    tp.release(pair)
    assert len(WORKSPACES.open) == 0


@pytest.mark.parametrize("kind", ["gather", "scatter", "first"])
@in_workspaces(2)
def test_ranks_with_other_rows_across_a_capacity_all_hear_of_it(rank, kind):
    up, down = tensor_of(0, 12, 8), tensor_of(0, 8, 12)
    # Rank 1 must grow: it asks before it would meet the other one, so longer than this test lasts.
    tp.reserve(8, 8, torch.float32, timeout_s=(1.5, 600.0)[rank])  # 8 rows of both ranks together
    if kind == "first":
        tp.release()

    def call(number):
        if kind == "scatter":
            return tp.matmul_reduce_scatter(tensor_of(rank, 2 * number, 12), down)
        return tp.all_gather_matmul(tensor_of(rank, number, 8), up)

    text = message_of(lambda: call((4, 6)[rank]))
    message_of(tp.release)
    dist.barrier()  # nobody has left a collective of the group that would meet this one
    assert tp.all_gather_matmul(tensor_of(rank, 6, 8), up).shape == (12, 12)
    given = "rank 0: 8, rank 1: 12" if kind == "scatter" else "rank 0: 4, rank 1: 6"
    assert text.startswith("ValueError: ")
    assert f"every rank must pass as many rows; {given}" in text


@in_workspaces(2)
def test_ranks_whose_peer_has_failed_release_with_it_and_begin_anew(rank, monkeypatch):
    x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8)
    tp.reserve(8, 16, torch.float32)
    wanted = tp.all_gather_matmul(x, up)
    tp.reserve(8, 24, torch.float32)
    (operation,) = (each.operation for key, each in WORKSPACES.open.items() if key.columns == 8)
    if rank == 1:
        monkeypatch.setattr(operation, "_launch", lambda *_: 1 // 0)
    told = message_of(lambda: tp.all_gather_matmul(x, up))
    assert ("failed on rank 1: ZeroDivisionError", "ZeroDivisionError: integer division")[rank] in told
    assert ("failed on rank 1", "was not carried out")[rank] in message_of(tp.release)
    assert torch.equal(tp.all_gather_matmul(x, up), wanted)


@in_workspaces(2)
def test_workspaces_are_given_back_by_width_and_with_their_group(rank):
    tp.reserve(8, 8, torch.float32)
    tp.reserve(8, 16, torch.float32)
    tp.release(features=16)
    assert {key.columns for key in WORKSPACES.open} == {8}
    pair = dist.new_group([0, 1])
    tp.reserve(8, 24, torch.float32, pair)
    operations = [weakref.ref(each.operation) for key, each in WORKSPACES.open.items() if key.columns == 24]
    dist.destroy_process_group(pair)
    tp.reserve(8, 32, torch.float32)
    gc.collect()
    assert {key.columns for key in WORKSPACES.open} == {8, 32}
    assert [each() for each in operations] == [None, None]


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


@in_workspaces(2)
def test_a_capture_opens_nothing_and_keeps_what_it_uses_until_release(rank):
    told = "RuntimeError: a captured call of 4 rows of 8 features in torch.float32 found {}"
    told += ": call once before the capture, or reserve() it"
    x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8)
    registry._is_capturing = lambda tensor: True
    assert message_of(lambda: tp.all_gather_matmul(x, up)) == told.format("no workspace")
    tp.reserve(4, 8, torch.float32)  # of both ranks
    assert message_of(lambda: tp.all_gather_matmul(x, up)) == told.format("a workspace of 2 rows")
    is_capturing, Operation._is_capturing = Operation._is_capturing, lambda op: True
    tp.all_gather_matmul(x[:2], up)
    registry._is_capturing, Operation._is_capturing = (lambda tensor: False), is_capturing
    assert tp.all_gather_matmul(x, up).shape == (8, 12)
    assert [workspace.rows for _, workspace in WORKSPACES.outgrown] == [2]
    tp.release()
    assert len(WORKSPACES.outgrown) == 0


@in_workspaces(2)
def test_a_rank_that_captures_once_more_than_its_peer_grows_with_it(rank):
    x, up, name = tensor_of(rank, 4, 8), tensor_of(0, 12, 8), dist.group.WORLD.group_name
    tp.reserve(8, 8, torch.float32, timeout_s=5.0)
    tp.all_gather_matmul(x, up)
    if rank == 0:
        registry._is_capturing = lambda tensor: True
        registry.opened(registry.AllGatherGemm, x, 4, 8, name)
        registry.announce_none(registry.AllGatherGemm, x[:0], 8, name)
        registry._is_capturing = lambda tensor: False
    assert tp.all_gather_matmul(tensor_of(rank, 6, 8), up).shape == (12, 12)


@in_workspaces(2)
def test_a_mesh_of_one_dimension_is_a_group_and_one_of_two_is_not(rank):
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8)
    wrong = "ValueError: the mesh has dimensions ('dp', 'tp'); pass one, mesh['tp']"
    assert message_of(lambda: tp.all_gather_matmul(x, up, mesh)) == wrong
    assert tp.all_gather_matmul(x, up, mesh["tp"]).shape == (8, 12)
    tp.release(mesh["tp"])
    of_one = dist.new_group([0])
    outside = "ValueError: global rank 1 is not a member of the group that was given"
    told = ("nothing was raised", outside)[rank]
    assert message_of(lambda: tp.reserve(4, 8, torch.float32, of_one)) == told
    if rank == 0:
        tp.release(of_one)
