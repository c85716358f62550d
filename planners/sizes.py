"""Bytes of the model, its state and one rank's shard, from the spec or from counted parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.models import Spec
from .gpt import parameter_count
from .memory import DeviceParts
from .shards import TensorInfo
from .state import shard_bytes, state_bytes, state_tensors
from .workload import Workload


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known once the parameters are."""

    parameters: int
    parameter_bytes: int
    tensors: int
    """Tensors of the state."""
    state_bytes: int
    shard_bytes: int
    """The largest shard."""


def count_sizes(spec: Spec, parameters: Sequence[TensorInfo] | None) -> Sizes | None:
    """Count `parameters`; None for a python model that nobody has described or built yet."""
    if parameters is None:
        return None
    tensors = state_tensors(parameters, spec.training.optimizer)
    return Sizes(
        parameters=parameter_count(parameters),
        parameter_bytes=state_bytes(parameters),
        tensors=len(tensors),
        state_bytes=state_bytes(tensors),
        shard_bytes=shard_bytes(tensors, spec.world_size),
    )


def device_parts(spec: Spec, sizes: Sizes, work: Workload | None) -> DeviceParts:
    """Return the device memory of one rank: the whole model, for it is replicated.

    Gradients have the weights' shapes and dtype and share memory with the buckets they are exchanged in.
    Under autocast the bf16 copies of the weights live as long as the pass. The activations of a model of unknown
    family are not known and count 0.
    """
    mixed = spec.training.precision == "bf16-mixed"
    activations = work.activation_bytes if work is not None else None
    return DeviceParts(
        weights_bytes=sizes.parameter_bytes,
        gradients_bytes=sizes.parameter_bytes,
        optimizer_bytes=sizes.state_bytes - sizes.parameter_bytes,
        casts_bytes=2 * sizes.parameters if mixed else 0,
        activations_bytes=activations or 0,
    )
