"""The repeated layers of a model: what is gathered, compiled and computed again as one unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models.gpt import GptPart


def units(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that stand in a list: a transformer's layers, whatever they are called."""
    return list(_units(model))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif isinstance(module, GptPart) and isinstance(child, nn.ModuleDict):
            yield from child.values()
        else:
            yield from _units(child)


def recompute(model: nn.Module) -> None:
    """Keep only the input of each layer and compute it again in the backward pass.

    Chen et al. 2016, arXiv:1604.06174. The layer's own forward is wrapped, so that no name changes and a layer's
    parameters are gathered once for both.
    """
    for unit in units(model):
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def compile_units(model: nn.Module) -> None:
    """Compile each layer by itself: they are alike, so one compilation serves all."""
    for unit in units(model):
        unit.compile()
