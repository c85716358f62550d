"""Evaluation: forward passes over held-out data between two steps, a phase in which the state does not change.

The copy of the step before goes on in them as it does in a step's own passes. Training is the same, bit for bit, as
without: generators, buffers and modes are put back as they were found.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...specs.datasets import TokenDataset
from ...tiers import faults
from ..models.build import to_device
from ..parallel.context import Context
from ..snapshot.snapshots import Snapshots
from ..snapshot.state import TrainState, random_states, seed_everything, set_random_state
from .parts import Parts

FIRST_DRAW = 2**32
"""Added to a batch's number where ranks add their own: no rank draws in training what an evaluation draws."""


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation gave, the same on all ranks but for the time."""

    step: int
    loss: float | None
    """Mean over all batches; None: it is not finite."""
    perplexity: float | None
    """e^loss, where the samples are runs of tokens."""
    batches: int
    samples: int
    seconds: float


def evaluate(parts: Parts, context: Context, snapshots: Snapshots | None) -> tuple[Evaluated | None, bool]:
    """Evaluate the state of `context.step`; returns None when a rank was told to stop before its end, and whether so.

    Batch b is the work of data parallel rank b modulo their number. Each is seeded by its number and summed alone,
    so the result does not depend on who did it.
    """
    held_out = parts.held_out
    assert held_out is not None
    started = time.perf_counter()
    losses = [0.0] * held_out.batches
    stopped = False
    with _undisturbed(parts.state, context.device), torch.no_grad():
        if context.world > 1:
            context.share(parts.state.changing().values())
        for number in _mine(held_out.batches, context):
            if stopped := _stops(context):
                break
            context.beat()
            if snapshots is not None:
                snapshots.forward_window()
            faults.point("evaluate.batch", context.step)
            loss = _loss(parts, context, min(number, held_out.batches - 1))
            if loss is not None and number < held_out.batches and context.rank % context.mesh.tp == 0:
                losses[number] = loss
    context.beat()
    *losses, left, stops = context.sum_over_ranks([*losses, float(stopped), float(context.stop.is_set)])
    if left:
        return None, True
    loss = sum(losses) / len(losses)
    evaluated = Evaluated(
        step=context.step,
        loss=loss if math.isfinite(loss) else None,
        perplexity=_perplexity(loss) if _over_tokens(parts) else None,
        batches=held_out.batches,
        samples=held_out.batches * held_out.micro_batch,
        seconds=time.perf_counter() - started,
    )
    return evaluated, stops > 0


def _mine(batches: int, context: Context) -> range:
    """Batches of this rank; where layers are cut all ranks go through the model equally often, some for nothing."""
    among = context.mesh.data_parallel
    until = batches if context.device_mesh is None else -(-batches // among) * among
    return range(context.data_rank, until, among)


def _stops(context: Context) -> bool:
    """Tell whether to leave before the next batch; where layers are cut all ranks leave together."""
    if context.device_mesh is None:
        return context.stop.is_set
    return not context.all_agree(not context.stop.is_set)


def _loss(parts: Parts, context: Context, number: int) -> float | None:
    assert parts.held_out is not None
    seed_everything(parts.spec.seed, FIRST_DRAW + number)
    batch = to_device(parts.held_out.get(number), context.device)
    loss = parts.passes.judge(batch, partial(context.autocast, parts.spec.training.precision))
    return None if loss is None else float(loss)


def _over_tokens(parts: Parts) -> bool:
    evaluation = parts.spec.evaluation
    own = evaluation.dataset if evaluation is not None else None
    return isinstance(own or parts.spec.dataset, TokenDataset)


def _perplexity(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None  # above, e^loss is no float; nor is NaN below


@contextlib.contextmanager
def _undisturbed(state: TrainState, device: torch.device) -> Iterator[None]:
    """Evaluation mode, and afterwards everything as it was that a forward pass may change, even a careless one."""
    modules: list[tuple[nn.Module, bool]] = [(module, module.training) for module in state.model.modules()]
    generators = random_states(device)
    changing = {name: tensor.clone() for name, tensor in state.changing().items()}
    state.model.eval()
    try:
        yield
    finally:
        for module, training in modules:  # train() would wake those that are kept in evaluation mode on purpose
            module.training = training
        with torch.no_grad():
            for name, tensor in state.changing().items():
                if name in changing:  # a snapshot refuses a buffer that is new
                    tensor.copy_(changing[name])
        for name, data in generators.items():
            set_random_state(name, data)
