"""Bytes of the model, its state and what one rank has of it, from the spec or from counted parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.models import Spec
from .memory import DeviceParts
from .models.activations import rank_activation_bytes
from .models.gpt import parameter_count
from .models.workload import Workload
from .packing import items_of
from .sharding.layout import Cuts, Layout, largest_shard, layout_of
from .sharding.mesh import DIMS, mesh_of
from .sharding.shards import TensorInfo, shard_bytes
from .sharding.state import state_bytes, state_tensors

_UNIT = re.compile(r"^(.*?\.\d+)\.")
"""A layer: what has a number in its name."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known once the parameters are."""

    parameters: int
    parameter_bytes: int
    parameter_tensors: int
    tensors: int
    """Tensors of the state."""
    state_bytes: int
    shard_bytes: int
    """The largest shard: what one rank stores."""
    shard_items: int
    """Copies that it takes: one per piece of a tensor, small pieces together."""
    rank_parameter_bytes: int
    """Weights that the rank with the most of them has."""
    stage_parameter_bytes: int
    """Those weights before data parallel ranks divide them."""
    gathered_bytes: int
    """Weights that FSDP2 has put together at once beside them, copies where it divides nothing; 0 without it."""

    @property
    def rank_state_bytes(self) -> int:
        """Weights of that rank with what the optimizer keeps of them."""
        return self.rank_parameter_bytes * self.state_bytes // max(1, self.parameter_bytes)


def count_sizes(spec: Spec, parameters: Sequence[TensorInfo] | None, cuts: Cuts | None = None) -> Sizes | None:
    """Count `parameters`; None for a python model that nobody has described or built yet."""
    if parameters is None:
        return None
    tensors = state_tensors(parameters, spec.training)
    layout = layout_of(spec, parameters, cuts)
    place, shard = dict.fromkeys(DIMS, 0), largest_shard(layout)
    stages = [layout.parameter_bytes(names, place, gathered=False) for names in layout.stages]
    most = stages.index(max(stages))
    return Sizes(
        parameters=parameter_count(parameters),
        parameter_bytes=state_bytes(parameters),
        parameter_tensors=len(parameters),
        tensors=len(tensors),
        state_bytes=state_bytes(tensors),
        shard_bytes=shard_bytes(shard),
        shard_items=items_of(shard),
        rank_parameter_bytes=stages[most],
        stage_parameter_bytes=layout.parameter_bytes(layout.stages[most], place, gathered=True),
        gathered_bytes=_gathered_bytes(layout, most),
    )


def _gathered_bytes(layout: Layout, stage: int) -> int:
    """Return the weights that are whole at once: what is no layer, the layer that computes, and the next one.

    A pipeline keeps all of them until its step has ended. Over replicas alone FSDP2 copies what it need not put
    together (torch 2.13, `FSDPParamGroup.wait_for_unshard`).
    """
    mesh, names = layout.mesh, layout.stages[stage]
    if not mesh.by_fsdp:
        return 0
    place = dict.fromkeys(DIMS, 0)
    if mesh.pp > 1:
        return layout.parameter_bytes(names, place, gathered=True)
    units: dict[str, list[str]] = {}
    for name in names:
        match = _UNIT.match(name)
        units.setdefault(match[1] if match else "", []).append(name)
    root = layout.parameter_bytes(units.pop("", []), place, gathered=True)
    layers = [layout.parameter_bytes(unit, place, gathered=True) for unit in _largest(units)]
    return root + sum(sorted(layers)[-2:])


def _largest(units: dict[str, list[str]]) -> list[list[str]]:
    """The units worth a look: layers of a model are alike, so those at its ends and the ones with the most tensors."""
    ordered = [units[name] for name in sorted(units)]
    return ordered if len(ordered) <= 8 else [*ordered[:2], *ordered[-2:], *sorted(ordered, key=len)[-2:]]


def device_parts(spec: Spec, sizes: Sizes, work: Workload | None, *, on_cpu: bool) -> DeviceParts:
    """Return the device memory of one rank.

    Gradients have the weights' shapes and dtype and share memory with the buckets they are exchanged in, but for those
    that DDP adds up over several passes: they lie beside the buckets until the last one. Of bf16 ones the update makes
    fp32 copies. Where FSDP2 puts weights together, their gradients are whole for a moment, too; in a pipeline, which
    exchanges them once per step, all of them until then. Under autocast the 16-bit copies of fp32 weights live as long
    as the pass, those of layers that FSDP2 has divided again too: the backward pass multiplies with them. The
    activations of a model of unknown family are not known and count 0.
    """
    mixed = spec.training.precision.endswith("-mixed")
    copied = 2 if spec.training.precision == "bf16" else 0
    mesh = mesh_of(spec)
    added_up = 1 if mesh.by_ddp and spec.micro_batches > 1 else 0
    gradients, gathered = (1 + max(copied, added_up)) * sizes.rank_parameter_bytes, 2 * sizes.gathered_bytes
    if mesh.by_fsdp and mesh.pp > 1:
        gradients, gathered = max(gradients, sizes.gathered_bytes), sizes.gathered_bytes
    return DeviceParts(
        weights_bytes=sizes.rank_parameter_bytes,
        gradients_bytes=gradients,
        optimizer_bytes=sizes.rank_state_bytes - sizes.rank_parameter_bytes,
        casts_bytes=sizes.stage_parameter_bytes // 2 if mixed else 0,
        gathered_bytes=gathered,
        activations_bytes=rank_activation_bytes(spec, work, on_cpu=on_cpu),
    )
