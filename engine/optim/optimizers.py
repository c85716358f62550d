"""Optimizers with state that exists from the first step, and learning rates as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...planners.sharding.mesh import WITHIN_STAGE, Mesh
from ...specs.models import AdamW, Scheduler, Sgd
from ..layout import cut_dims, local_of
from .masters import MASTER, Groups, Masters
from .neighbours import lay_side_by_side

EMA = "ema"
"""Under which the optimizer's state holds the average of a weight."""
CLIP_EPS = 1e-6
"""Added to the norm as torch's clip_grad_norm_ does."""


def build_optimizer(
    model: nn.Module, spec: AdamW | Sgd, *, ema: bool = False, masters: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer over all trainable parameters; vectors (norms, biases) are not decayed.

    Parameters that are cut over other dimensions of the mesh cannot be updated in one call, so they are groups of
    their own. With `ema` an average of each weight is kept among its moments, so that it is cut and stored as they are.
    With `masters` weights that are not fp32 are updated through fp32 copies, which an average then is of.
    """
    groups: dict[tuple[bool, tuple[str, ...]], list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.dim() < 2, _mesh_dims(parameter)), []).append(parameter)
    given: Groups = [
        {"params": groups[key], "lr": spec.lr, "weight_decay": 0.0 if key[0] else spec.weight_decay}
        for key in sorted(groups)
    ]
    make = partial(_over, spec=spec)
    optimizer = Masters(given, make) if masters else make(given)
    if ema:
        for group in given:
            for parameter in group["params"]:
                kept = optimizer.state[parameter]
                kept[EMA] = kept.get(MASTER, parameter).detach().clone()
    lay_side_by_side(optimizer, model)
    return optimizer


def _over(given: Groups, spec: AdamW | Sgd) -> torch.optim.Optimizer:
    if isinstance(spec, Sgd):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(given, lr=spec.lr, momentum=spec.momentum)
    else:
        optimizer = torch.optim.AdamW(given, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps, fused=True)
    _create_state(optimizer)
    return optimizer


class Average:
    """The average of the weights over the updates, on this rank's part of them (Polyak & Juditsky 1992)."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Follow the parameters of an optimizer that was built with `ema`."""
        self.optimizer, self.decay = optimizer, decay

    @torch.no_grad()
    def follow(self) -> None:
        """An update is done: decay * average + (1 - decay) * weight."""
        pairs = [
            (local_of(kept[EMA]), local_of(kept.get(MASTER, parameter)))
            for parameter, kept in self.optimizer.state.items()
        ]
        if pairs:
            averages, weights = zip(*pairs, strict=True)
            torch._foreach_lerp_(list(averages), list(weights), 1 - self.decay)


def _mesh_dims(parameter: Tensor) -> tuple[str, ...]:
    return tuple(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the moments now, as zeros, instead of at the first update.

    The first update from zeros equals the one that would have created them; so slots can be laid out, and their
    pages touched, before step 1. A parameter that never gets a gradient keeps zeros.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            if isinstance(optimizer, torch.optim.AdamW):
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
            elif group.get("momentum"):
                optimizer.state[parameter] = {"momentum_buffer": zeros}


def learning_rate(step: int, peak: float, spec: Scheduler, max_steps: int) -> float:
    """Learning rate of the update that makes step `step` (1 … max_steps).

    Linear from 0 to `peak` over `warmup_steps`, then constant, linear or cosine (arXiv:1608.03983, without restarts)
    down to `min_lr_ratio · peak` at the last step.
    """
    if step <= spec.warmup_steps:
        return peak * step / spec.warmup_steps
    if spec.name == "constant":
        return peak
    progress = min(1.0, (step - spec.warmup_steps) / max(1, max_steps - spec.warmup_steps))
    shape = 1 - progress if spec.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in every group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale the gradients down to a global norm of `max_norm`; returns the norm before.

    For a model that is whole on every rank, whose gradients are alike everywhere.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if max_norm is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def unscale(parameters: Iterable[Tensor], scale: float) -> None:
    """Take the factor of the loss out of the gradients."""
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, 1 / scale)


def clip_cut_gradients(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    mesh: Mesh,
    sum_over_ranks: Callable[[list[float]], list[float]],
    shared: Tensor | None = None,
) -> float:
    """As `clip_gradients` for parameters that are cut over the ranks: each square counts once.

    What n ranks hold alike counts 1/n on each of them; the sum over all ranks is taken in float64. `shared` is the
    parameter that both ends of a pipeline hold.
    """
    squares = 0.0
    gradients = _settled(parameters, shared)
    for (cut, stages), found in gradients.items():
        alike = stages * math.prod(getattr(mesh, dim) for dim in WITHIN_STAGE if dim not in cut)
        squares += float(torch.nn.utils.get_total_norm(found)) ** 2 / alike
    norm = math.sqrt(sum_over_ranks([squares])[0])
    if max_norm is not None and math.isfinite(norm):
        factor = min(1.0, max_norm / (norm + CLIP_EPS))
        torch._foreach_mul_([gradient for found in gradients.values() for gradient in found], factor)
    return norm


def _settled(parameters: Iterable[Tensor], shared: Tensor | None) -> dict[tuple[tuple[str, ...], int], list[Tensor]]:
    """This rank's parts of all gradients, sums over ranks completed.

    By the dimensions they are cut over and the number of stages that hold them.
    """
    found: dict[tuple[tuple[str, ...], int], list[Tensor]] = {}
    for parameter in parameters:
        gradient = settled(parameter)
        if gradient is not None:
            found.setdefault((cut_dims(parameter), 2 if parameter is shared else 1), []).append(gradient)
    return found


def settled(parameter: Tensor) -> Tensor | None:
    """This rank's part of a gradient, its sum over ranks completed."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:  # a norm that has seen a part of each sequence
            gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        return local_of(gradient)
    return gradient
