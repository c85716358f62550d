"""What a checkpoint holds: the model's tensors, then the optimizer's, by canonical name."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs.models import AdamW, Sgd
from .shards import TensorInfo


def state_tensors(parameters: Sequence[TensorInfo], optimizer: AdamW | Sgd, *, ema: bool = False) -> list[TensorInfo]:
    """Return the tensors of the state in the order in which they are stored.

    First `model.<name>` for all `parameters` in their own dtype (fp32 in all precisions: the mixed ones cast
    for the passes only), then per parameter what the optimizer keeps.
    """
    tensors = [TensorInfo(f"model.{p.name}", p.dtype, p.shape) for p in parameters]
    return tensors + [tensor for p in parameters for tensor in moments(p, optimizer, ema=ema)]


def moments(parameter: TensorInfo, optimizer: AdamW | Sgd, *, ema: bool = False) -> list[TensorInfo]:
    """Return what the optimizer keeps of a parameter.

    A step counter and two moments for adamw, a momentum buffer for sgd with momentum, nothing for plain sgd; and an
    average of the weight where one is kept.
    """
    name, shape = f"optimizer.{parameter.name}", parameter.shape
    average = [TensorInfo(f"{name}.ema", parameter.dtype, shape)] if ema else []
    if isinstance(optimizer, AdamW):
        return [
            TensorInfo(f"{name}.step", "F32", ()),
            TensorInfo(f"{name}.exp_avg", "F32", shape),
            TensorInfo(f"{name}.exp_avg_sq", "F32", shape),
            *average,
        ]
    return [TensorInfo(f"{name}.momentum_buffer", "F32", shape), *average] if optimizer.momentum > 0 else average


def state_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of the whole state."""
    return sum(tensor.nbytes for tensor in tensors)
