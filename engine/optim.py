"""Optimizers with state that exists from the first step, and learning rates as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..specs.models import AdamW, Scheduler, Sgd


def build_optimizer(model: nn.Module, spec: AdamW | Sgd) -> torch.optim.Optimizer:
    """Make the optimizer over all trainable parameters; vectors (norms, biases) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(spec, Sgd):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps, fused=True
        )
    _create_state(optimizer)
    return optimizer


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


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradients down to a global norm of `max_norm`; returns the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if max_norm is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
