from __future__ import annotations

from typing import Any

import pytest

from dtrain.planners.sharding.layout import Layout, largest_shard
from dtrain.planners.sharding.mesh import Mesh
from dtrain.planners.sharding.shards import TensorInfo, divide, shard_bytes
from dtrain.planners.sharding.state import state_bytes, state_tensors
from dtrain.specs.models import Training

PARAMETERS = [TensorInfo("a.weight", "F32", (4, 3)), TensorInfo("b.bias", "F32", (5,))]


def training(**changes: Any) -> Training:
    values = {"global_batch_size": 8, "micro_batch_size": 2, "optimizer": {"name": "adamw", "lr": 1e-3}}
    return Training.model_validate(values | changes)


def test_adamw_stores_two_moments_and_a_step_per_parameter() -> None:
    tensors = state_tensors(PARAMETERS, training())
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [
        ("model.a.weight", "F32", (4, 3)),
        ("model.b.bias", "F32", (5,)),
        ("optimizer.a.weight.step", "F32", ()),
        ("optimizer.a.weight.exp_avg", "F32", (4, 3)),
        ("optimizer.a.weight.exp_avg_sq", "F32", (4, 3)),
        ("optimizer.b.bias.step", "F32", ()),
        ("optimizer.b.bias.exp_avg", "F32", (5,)),
        ("optimizer.b.bias.exp_avg_sq", "F32", (5,)),
    ]
    assert state_bytes(tensors) == 3 * 4 * 17 + 2 * 4


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 1), (0.9, 2)])
def test_sgd_stores_momentum_only_if_it_has_one(momentum: float, copies: int) -> None:
    tensors = state_tensors(PARAMETERS, training(optimizer={"name": "sgd", "lr": 1e-3, "momentum": momentum}))
    assert state_bytes(tensors) == copies * 4 * 17
    if momentum:
        assert tensors[2].name == "optimizer.a.weight.momentum_buffer"


def test_the_shard_is_the_largest_of_all() -> None:
    tensors, names = state_tensors(PARAMETERS, training()), frozenset(p.name for p in PARAMETERS)
    for world in (1, 2, 3, 7):
        layout = Layout(Mesh(dp_replicate=world), (names,), {}, tuple(PARAMETERS), training())
        sizes = [sum(piece.nbytes for piece in shard) for shard in divide(tensors, world)]
        assert shard_bytes(largest_shard(layout)) == max(sizes) >= state_bytes(tensors) / world
