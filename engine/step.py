"""One step: n forward and backward passes with the copy of the step before in their windows, then the update."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..tiers import faults
from ..tiers.layout import Version
from .context import Context
from .optim import clip_gradients, learning_rate, set_learning_rate
from .parts import Parts
from .snapshot import Snapshots
from .timing import StepClock

_KEPT = "the state of step {} was kept; dtrain resume --from STEP goes back further, a lower lr may help"


class TrainingDiverged(Exception):
    """The loss or a gradient is not a number any more; a restart would end the same way."""


@dataclass
class Progress:
    """The position of a run: everything but tensors that a restart needs."""

    step: int = 0
    samples: int = 0

    def meta(self, parts: Parts, spec_digest: str, world: int) -> dict[str, Any]:
        """What the manifest says beside the tensors."""
        scheduler = parts.spec.training.scheduler
        return {
            "mesh": {"dp_replicate": world, "dp_shard": 1, "tp": 1, "pp": 1},
            "spec_digest": spec_digest,
            "data": {
                "samples": self.samples,
                "seed": parts.spec.seed,
                "size": parts.batches.size,
                "fingerprint": parts.fingerprint,
                "spec": parts.data_digest,
            },
            "scheduler": {"name": scheduler.name, "step": self.step},
            "ties": parts.ties,
        }


@dataclass(frozen=True)
class StepOutcome:
    """What one step gave."""

    metrics: dict[str, Any]
    stop: bool
    drain_busy: bool
    committed: Version | None


def train_step(parts: Parts, context: Context, progress: Progress, snapshots: Snapshots | None) -> StepOutcome:
    """Make one optimizer update; the snapshot of the step before is complete when it returns."""
    step = progress.step + 1
    clock = StepClock(context.device)
    faults.point("step.start", step)
    loss = _passes(parts, context, progress.samples, snapshots, clock, step)
    with clock.waiting("stall"):
        copied = snapshots.finish() if snapshots is not None else 0
    mean, stop, drain_busy = _agree(parts, context, loss, snapshots)
    committed = snapshots.superseded() if snapshots is not None else None
    faults.point("update.before", step)
    lr = learning_rate(step, parts.spec.training.optimizer.lr, parts.spec.training.scheduler, parts.spec.max_steps)
    with clock.part("optimizer"):
        norm = _update(parts, lr, mean, step)
    faults.point("update.after", step)
    seconds = clock.total()
    progress.step, progress.samples = step, progress.samples + parts.spec.training.global_batch_size
    metrics = {
        "step": step,
        "loss": mean,
        "lr": lr,
        "grad_norm": norm,
        "step_s": seconds,
        "forward_s": clock.seconds["forward"],
        "backward_s": clock.seconds["backward"],
        "optimizer_s": clock.seconds["optimizer"],
        "stall_s": clock.seconds["stall"],
        "snapshot_bytes": copied,
    }
    return StepOutcome(metrics, stop, drain_busy, committed)


def _passes(
    parts: Parts, context: Context, samples: int, snapshots: Snapshots | None, clock: StepClock, step: int
) -> Tensor:
    """All forward and backward passes; returns the mean loss of this rank."""
    passes = parts.spec.micro_batches
    total: Tensor | None = None
    for micro in range(passes):
        batch = parts.batch(samples, micro, context)
        last = micro == passes - 1
        with contextlib.nullcontext() if last else parts.wrapped.no_sync():
            context.beat()
            if snapshots is not None:
                snapshots.forward_window()
            faults.point("window.forward", step)
            with clock.part("forward"):
                loss = parts.loss(batch, context) / passes
            context.beat()
            if snapshots is not None:
                snapshots.backward_window()
            faults.point("window.backward", step)
            with clock.part("backward"):
                loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    context.beat()
    assert total is not None
    return total


def _agree(parts: Parts, context: Context, loss: Tensor, snapshots: Snapshots | None) -> tuple[float, bool, bool]:
    """Once every rank has its snapshot whole: mean loss, whether to stop, whether a drainer is busy."""
    draining = snapshots is not None and snapshots.draining()
    values = [float(loss), float(context.stop.is_set), float(draining)]
    total, stop, busy = context.sum_over_ranks(values)
    return total / context.world, stop > 0, busy > 0


def _update(parts: Parts, lr: float, mean_loss: float, step: int) -> float:
    """Clip and update, unless that would write something that is not a number into the weights."""
    if not math.isfinite(mean_loss):
        raise TrainingDiverged(f"the loss is {mean_loss} at step {step}; {_KEPT.format(step - 1)}")
    norm = float(clip_gradients(parts.model, parts.spec.training.max_grad_norm))
    if not math.isfinite(norm):
        raise TrainingDiverged(f"the gradient norm is {norm} at step {step}; {_KEPT.format(step - 1)}")
    set_learning_rate(parts.optimizer, lr)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return norm
