"""The planner's arithmetic of layouts against what torch's own wrappers make of the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.planners.build import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtrain.engine.layout import held_of
from dtrain.engine.models.gpt import Gpt
from dtrain.engine.parallel.wrap import spread as spread_model
from dtrain.planners.models import gpt
from dtrain.planners.sharding.layout import layout_of, shared_by_ends
from dtrain.planners.sharding.mesh import DIMS, mesh_of
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.specs.models import GptModel, Spec

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 4},
    "hybrid": {"dp_replicate": 2, "dp_shard": 4},
    "tensor": {"tp": 2},
    "tensor and fsdp": {"tp": 2, "dp_shard": 3},
    "tensor and replicas": {"tp": 2, "dp_replicate": 2},
    "pipeline": {"pp": 2},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved-1f1b"},
    "tied ends": {"pp": 3, "dp_shard": 2, "tp": 2},
    "tied ends, interleaved": {"pp": 2, "dp_replicate": 2, "pp_schedule": "interleaved-1f1b"},
    "everything": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_what_torch_makes_of_the_model(name: str) -> None:
    """The real wrappers, over process groups that move nothing, on a model without memory."""
    strategy = {"dp_replicate": 1} | STRATEGIES[name]
    world = math.prod(strategy.get(dim, 1) for dim in DIMS)
    model: dict[str, Any] = {"type": "gpt", "n_layers": 5, "d_model": 12, "n_heads": 2, "d_ff": 10, "vocab_size": 22}
    model["tie_embeddings"] = name.startswith("tied")
    spec = tiny(model=model, strategy=strategy, training={"global_batch_size": 64}, cluster={"workers_per_node": world})
    assert isinstance(spec.model, GptModel)
    layout = layout_of(spec, gpt.parameters(spec.model))
    for rank in range(world):
        assert held_by_torch(spec, rank) == [
            (box.tensor.name.removeprefix("model."), box.offset, box.shape, box.holders)
            for box in layout.held(rank)
            if box.tensor.name.startswith("model.")
        ]


def held_by_torch(spec: Spec, rank: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    assert isinstance(spec.model, GptModel)
    mesh = mesh_of(spec)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world)
    try:
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=DIMS)
        with torch.device("meta"):
            model = Gpt(spec.model)
        spread_model(model, spec, mesh, device_mesh, rank)
        found = []
        for name, parameter in model.named_parameters():
            info = TensorInfo(name, "F32", tuple(parameter.shape))
            box = held_of(info, parameter, mesh, rank, ends=name in shared_by_ends(spec))
            if box is not None:
                found.append((name, box.offset, box.shape, box.holders))
        return found
    finally:
        _clear_sharding_prop_cache()  # it holds meshes, in which this process has another rank next time
        dist.destroy_process_group()
