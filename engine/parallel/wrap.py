"""Spread a model over the ranks as the spec's strategy says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ...planners.models.activations import cuts_sequence
from ...planners.sharding.layout import shared_by_ends
from ...planners.sharding.mesh import Mesh
from ...specs.models import PythonModel, Spec
from ..models.gpt import Gpt, draw_weights, tie
from . import pipeline, tensor
from .pipeline import Line
from .units import compile_units, recompute, units


@dataclass(frozen=True)
class Spread:
    """A model spread over the ranks, before any optimizer."""

    model: nn.Module
    """Holds this rank's parameters under their names; it is what is called for a loss unless there are stages."""
    line: Line | None = None
    """The stages of a pipeline that this rank holds."""
    tied_ends: bool = False
    """The first stage holds a matrix as embedding that the last one holds as head."""

    @property
    def roots(self) -> list[nn.Module]:
        """What together holds all parameters: the stages, or the model."""
        return [self.model] if self.line is None else [part.module for part in self.line.parts]


def spread(
    model: nn.Module, spec: Spec, mesh: Mesh, device_mesh: DeviceMesh | None, rank: int, line: Line | None = None
) -> Spread:
    """Cut `model`, whole and the same on every rank, or without memory, in place.

    A model of one's own comes cut by tensor parallel, and into the stages `line`, already. Tensor parallel first, then
    the stages, then the layers' own forward passes, then data parallel: the order in which each sees what the one
    before has made of a parameter.
    """
    strategy = spec.strategy
    if device_mesh is not None and mesh.tp > 1 and isinstance(model, Gpt):
        tensor.parallelize(model, device_mesh["tp"], sequence=cuts_sequence(spec))
    if mesh.pp > 1 and isinstance(model, Gpt):
        line = pipeline.split(model, spec, mesh.place(rank)["pp"])
    found = Spread(model, line, tied_ends=bool(shared_by_ends(spec)))
    if strategy.activation_checkpointing == "full":
        recompute(model)
    if strategy.compile:
        compile_units(model)
    if device_mesh is not None and mesh.data_parallel > 1:
        over = device_mesh["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else device_mesh["dp_shard"]
        for root in found.roots:
            _shard(root, over, keep=mesh.pp > 1)
    _name_head(found)
    return found


def _name_head(found: Spread) -> None:
    """Let the last stage's head have the name of the embedding that it is tied to.

    The embedding beside it is no module of the stage: nothing calls it, it gives the name only.
    """
    if found.tied_ends and isinstance(found.model, Gpt) and found.model.head is not None:
        assert found.model.embedding is not None
        found.model.embedding.weight = found.model.head.weight


def _shard(root: nn.Module, mesh: DeviceMesh, *, keep: bool) -> None:
    """FSDP2: each layer is gathered by itself, everything else with the root.

    `keep`: a pipeline runs many forward passes before the backward ones, so what is gathered stays.
    """
    for layer in units(root):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(root, mesh=mesh, reshard_after_forward=not keep)


def fill(found: Spread, spec: Spec, mesh: Mesh, device: torch.device, rank: int) -> None:
    """Give a decoder that was cut without memory its memory on `device`, and its first weights."""
    for root in found.roots:
        root.to_empty(device=device)
    assert isinstance(found.model, Gpt)
    if found.tied_ends:
        _name_head(found)
    else:
        tie(found.model)
    draw_weights(found.model, spec.seed, mesh, rank)


def replicated(model: nn.Module, spec: Spec) -> DistributedDataParallel:
    """The whole model on every rank: DDP."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=isinstance(spec.model, PythonModel),
    )
