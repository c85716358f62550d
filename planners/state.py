"""What a checkpoint holds: the model's tensors, then the optimizer's, by canonical name."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs.models import AdamW, Sgd
from .shards import TensorInfo, divide


def state_tensors(parameters: Sequence[TensorInfo], optimizer: AdamW | Sgd) -> list[TensorInfo]:
    """Return the tensors of the state in the order in which they are stored.

    First `model.<name>` for all `parameters` in their own dtype (fp32 in both precisions: bf16-mixed casts
    for the passes only), then per parameter what the optimizer keeps: two moments and a step counter for
    adamw, a momentum buffer for sgd with momentum, nothing for plain sgd.
    """
    tensors = [TensorInfo(f"model.{p.name}", p.dtype, p.shape) for p in parameters]
    for p in parameters:
        if isinstance(optimizer, AdamW):
            tensors.append(TensorInfo(f"optimizer.{p.name}.exp_avg", "F32", p.shape))
            tensors.append(TensorInfo(f"optimizer.{p.name}.exp_avg_sq", "F32", p.shape))
            tensors.append(TensorInfo(f"optimizer.{p.name}.step", "F32", ()))
        elif optimizer.momentum > 0:
            tensors.append(TensorInfo(f"optimizer.{p.name}.momentum_buffer", "F32", p.shape))
    return tensors


def state_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of the whole state."""
    return sum(tensor.nbytes for tensor in tensors)


def shard_bytes(tensors: Sequence[TensorInfo], world: int) -> int:
    """Bytes of the largest shard when `world` ranks divide the state."""
    return max(sum(piece.nbytes for piece in shard) for shard in divide(tensors, world))
