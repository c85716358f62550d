"""From the spec's model block to a module, and one way to call every module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...specs.models import GptModel, PythonModel
from ..entry import UserCodeError, call_entry
from .gpt import Gpt


def build_model(spec: GptModel | PythonModel) -> nn.Module:
    """Make the model on the CPU; raises UserCodeError when a `python` entry is not usable."""
    if isinstance(spec, GptModel):
        return Gpt(spec)
    model = call_entry(spec.entry, spec.kwargs, "model.entry")
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"model.entry {spec.entry} returned {type(model).__name__}, it must return an nn.Module")
    return model


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call a model on a batch (tensor, tuple of arguments or dict of keywords) and return its mean loss.

    The loss is the result itself, its attribute `loss` or its key `loss`; it must be one number.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserCodeError(f"the model's forward must return its mean loss (one number), it returned {got}")
    return loss.reshape(())


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch
