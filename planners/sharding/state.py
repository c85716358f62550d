"""What a checkpoint holds: the model's tensors, then the optimizer's, by canonical name."""

from __future__ import annotations

from collections.abc import Sequence

from ...specs.models import AdamW, Training
from .shards import TensorInfo


def state_tensors(parameters: Sequence[TensorInfo], training: Training) -> list[TensorInfo]:
    """Return the tensors of the state in the order in which they are stored.

    First `model.<name>` for all `parameters` in their own dtype (fp32 in the mixed precisions, too, which cast for
    the passes only), then per parameter what the optimizer keeps.
    """
    tensors = [TensorInfo(f"model.{p.name}", p.dtype, p.shape) for p in parameters]
    return tensors + [tensor for p in parameters for tensor in kept(p, training)]


def kept(parameter: TensorInfo, training: Training) -> list[TensorInfo]:
    """Return what the optimizer keeps of a parameter.

    A step counter and two moments for adamw, a momentum buffer for sgd with momentum, nothing for plain sgd; and an
    average of the weight where one is wanted. Under `bf16` they are those of an fp32 copy of the weight, kept, too.
    """
    name, shape, dtype = f"optimizer.{parameter.name}", parameter.shape, parameter.dtype
    found = []
    if training.precision == "bf16" and dtype != "F32":
        dtype = "F32"
        found.append(TensorInfo(f"{name}.master", dtype, shape))
    if isinstance(training.optimizer, AdamW):
        found.append(TensorInfo(f"{name}.step", "F32", ()))
        found += [TensorInfo(f"{name}.{moment}", dtype, shape) for moment in ("exp_avg", "exp_avg_sq")]
    elif training.optimizer.momentum > 0:
        found.append(TensorInfo(f"{name}.momentum_buffer", dtype, shape))
    return found + ([TensorInfo(f"{name}.ema", dtype, shape)] if training.ema_decay is not None else [])


def state_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of the whole state."""
    return sum(tensor.nbytes for tensor in tensors)
