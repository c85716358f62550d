"""bf16 weights that are updated through fp32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import local_of

MASTER = "master"
"""Under which key the copy of a weight is found in what the optimizer keeps of it."""

Groups = list[dict[str, Any]]


class Masters(torch.optim.Optimizer):
    """An optimizer of bf16 weights that updates fp32 copies of them, with fp32 moments.

    An update is often smaller than the last bit of a bf16 weight: added to the weight itself it would be lost.
    (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1; Megatron-LM and nanotron keep such copies, too.)
    Weights that are fp32 already are updated themselves.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        """`make` builds the optimizer of the copies, with its state, from groups of them."""
        super().__init__(groups, {})
        self.copies: dict[Tensor, Tensor] = {
            parameter: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for group in groups
            for parameter in group["params"]
        }
        self._lower = [(weight, copy) for weight, copy in self.copies.items() if copy is not weight]
        self.inner = make([{**group, "params": [self.copies[p] for p in group["params"]]} for group in groups])
        for weight, copy in self.copies.items():
            held = {} if copy is weight else {MASTER: copy.detach()}
            self.state[weight] = {**held, **self.inner.state.get(copy, {})}

    def take_gradients(self) -> None:
        """Move the gradients to the copies, in fp32: norm, clipping and update see them there."""
        for weight, copy in self._lower:
            if weight.grad is not None:
                copy.grad, weight.grad = weight.grad.float(), None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the copies, then round the weights to them."""
        self.take_gradients()
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        self.inner.step(closure)
        if self._lower:
            weights, copies = zip(*((local_of(weight), local_of(copy)) for weight, copy in self._lower), strict=True)
            torch._foreach_copy_(list(weights), list(copies))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the weights and of the copies."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)


def lower(model: nn.Module) -> None:
    """Bring the weights of a model to bf16, in place.

    A module that keeps running figures in fp32 buffers of its own, such as batch norm, stays in fp32 with them.
    """
    for module in model.modules():
        if any(buffer is not None and buffer.is_floating_point() for buffer in module._buffers.values()):
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in (torch.float32, torch.float64):
                parameter.data = parameter.data.to(torch.bfloat16)


def updated_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    """What the update of a model works on, with gradients, in the order of its parameters: they, or fp32 copies."""
    if isinstance(optimizer, Masters):
        optimizer.take_gradients()
    return updated_of(optimizer, model.parameters())


def updated_of(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """These parameters, or their fp32 copies where the update works on such."""
    copies = optimizer.copies if isinstance(optimizer, Masters) else {}
    return [copies.get(parameter, parameter) for parameter in parameters]
