"""One step: n forward and backward passes with the copy of the step before in their windows, then the update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...planners.sharding.mesh import mesh_of
from ...specs.load import spec_to_json
from ...tiers import faults
from ...tiers.format.layout import Version
from ..optim.masters import updated_by, updated_of
from ..optim.optimizers import clip_cut_gradients, clip_gradients, learning_rate, set_learning_rate, unscale
from ..parallel.context import Context
from ..snapshot.decided import Copied, Late, Offered, Refused
from ..snapshot.snapshots import Snapshots
from ..timing import StepClock
from .parts import Parts
from .passes import Watch
from .scaling import LossScale


class TrainingDiverged(Exception):
    """The loss, a gradient or the state is not finite any more; a restart would end the same way."""


@dataclass
class Progress:
    """The position of a run: everything but tensors that a restart needs."""

    step: int = 0
    samples: int = 0
    loss_scale: LossScale | None = None
    """Set where the precision needs one."""
    _fixed: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def meta(self, parts: Parts, spec_digest: str) -> dict[str, Any]:
        """What the manifest says beside the tensors; what stays the same in an attempt is put together once."""
        if self._fixed is None:
            self._fixed = _fixed_meta(parts, spec_digest)
        return {
            **self._fixed,
            "data": {**self._fixed["data"], "samples": self.samples},
            "scheduler": {**self._fixed["scheduler"], "step": self.step},
            **({"loss_scale": self.loss_scale.to_json()} if self.loss_scale is not None else {}),
        }


def _fixed_meta(parts: Parts, spec_digest: str) -> dict[str, Any]:
    return {
        "mesh": mesh_of(parts.spec).to_json(),
        "spec": spec_to_json(parts.spec),
        "spec_digest": spec_digest,
        "data": {
            "seed": parts.spec.seed,
            "size": parts.batches.size,
            "fingerprint": parts.fingerprint,
            "spec": parts.data_digest,
        },
        "scheduler": {"name": parts.spec.training.scheduler.name},
        "ties": parts.ties,
    }


@dataclass(frozen=True)
class StepOutcome:
    """What one step gave."""

    metrics: dict[str, Any]
    stop: bool
    drain_busy: bool
    """The drainer of a rank holds a slot."""
    committed: Version | None
    refused: Refused | None
    offered: Offered | None
    """What was decided on the checkpoint of the step before."""
    copied: Copied | Late | None = None
    """A version that all peers have by now, or still lack."""


def train_step(parts: Parts, context: Context, progress: Progress, snapshots: Snapshots | None) -> StepOutcome:
    """Make one optimizer update; the snapshot of the step before is complete when it returns, or refused.

    It is complete before the update where the training thread waits for it, and may be until after it where a device
    waits with the update for the copy alone.
    """
    step = progress.step + 1
    clock = StepClock(context.device, context.unfinished)
    faults.point("step.start", step)
    if context.device_mesh is not None:  # else DDP does it
        context.share(parts.state.changing().values())
    scale = progress.loss_scale
    parts.passes.scale = 1.0 if scale is None else scale.scale
    loss = parts.run(progress.samples, context, Watch(context, snapshots, clock, step))
    context.beat()
    late = snapshots is not None and snapshots.ends_after_update
    copied = 0 if late else _wait(snapshots, clock)
    agreed = _agree(context, loss, None if late else snapshots)
    mean, stop = agreed.mean, agreed.stop
    if not late:
        ended = _end(parts, context, snapshots, agreed)
    faults.point("update.before", step)
    lr = learning_rate(step, parts.spec.training.optimizer.lr, parts.spec.training.scheduler, parts.spec.max_steps)
    with clock.part("optimizer"):
        norm, updated = _update(parts, context, lr, mean, step, snapshots, scale)
    faults.point("update.after", step)
    if late:
        copied = _wait(snapshots, clock)
        agreed = _agree(context, None, snapshots)
        stop |= agreed.stop
        ended = _end(parts, context, snapshots, agreed)
    seconds = clock.total()
    context.busy_s += clock.seconds["data"] + clock.seconds["forward"]
    progress.step, progress.samples = step, progress.samples + parts.spec.training.global_batch_size
    metrics = {
        "step": step,
        "loss": mean if math.isfinite(mean) else None,
        "lr": lr,
        "grad_norm": norm,
        "step_s": seconds,
        "forward_s": clock.seconds["forward"],
        "backward_s": clock.seconds["backward"],
        "optimizer_s": clock.seconds["optimizer"],
        "stall_s": clock.seconds["stall"],
        "snapshot_bytes": copied if ended.refused is None else 0,
    }
    if scale is not None:
        metrics |= {"loss_scale": parts.passes.scale, "skipped": not updated}
    drain_busy = agreed.drain_busy or (ended.offered is not None and ended.offered.pinned)
    return StepOutcome(metrics, stop, drain_busy, ended.committed, ended.refused, ended.offered, ended.copied)


class _Agreed(NamedTuple):
    """What all ranks said, the same on each."""

    mean: float
    """Loss over all of them."""
    stop: bool
    """One was told to."""
    drain_busy: bool
    """A drainer is."""
    peers_busy: bool
    """One has not got its copy yet."""
    clean: bool
    """None refuses the snapshot."""


def _agree(context: Context, loss: Tensor | None, snapshots: Snapshots | None) -> _Agreed:
    """Say it; of snapshots once this rank has its copy."""
    draining = snapshots is not None and snapshots.draining()
    refuses = snapshots is not None and snapshots.refused is not None
    sending = snapshots is not None and snapshots.offers is not None and snapshots.offers.busy()
    flags = [context.stop.is_set, draining, sending, refuses]
    total, *summed = context.sum_over_ranks([0.0 if loss is None else float(loss), *map(float, flags)])
    stop, busy, to_peers, refused = (count > 0 for count in summed)
    return _Agreed(total / (context.world // context.mesh.pp), stop, busy, to_peers, not refused)


def _wait(snapshots: Snapshots | None, clock: StepClock) -> int:
    """Until this rank has its copy of the step before, and has sent what is late; returns the bytes of the copy."""
    with clock.waiting("stall"):
        copied = snapshots.finish() if snapshots is not None else 0
        if snapshots is not None:
            snapshots.wait_for_peers()
    return copied


class _Ended(NamedTuple):
    """What becomes of the snapshot of the step before."""

    committed: Version | None = None
    refused: Refused | None = None
    offered: Offered | None = None
    copied: Copied | Late | None = None


def _end(parts: Parts, context: Context, snapshots: Snapshots | None, agreed: _Agreed) -> _Ended:
    """Every rank has its copy, and has agreed on it; raises TrainingDiverged for a state that the spec stops at."""
    if snapshots is None:
        return _Ended()
    committed, refused = settle(context, snapshots, clean=agreed.clean)
    offered = snapshots.offer(drain_busy=agreed.drain_busy)
    copied = snapshots.share(busy=agreed.peers_busy)
    if refused is not None and parts.spec.checkpoint.non_finite == "stop":
        raise diverged(refused, snapshots)
    return _Ended(committed, refused, offered, copied)


def settle(context: Context, snapshots: Snapshots | None, *, clean: bool) -> tuple[Version | None, Refused | None]:
    """Every rank has finished its copy: the version that is whole now, or the one that none keeps.

    `clean` is what all ranks agreed on: none of them refuses it.
    """
    if snapshots is None:
        return None, None
    if clean:
        return snapshots.superseded(), None
    named = context.gather_bytes((snapshots.refused or "").encode())
    return None, snapshots.refuse(next(name for name in named if name).decode())


def diverged(refused: Refused, snapshots: Snapshots | None) -> TrainingDiverged:
    """The error for a state that was refused."""
    words = f"{refused.tensor} holds NaN or infinity after the update of step {refused.version.step}"
    return TrainingDiverged(f"{words}; {_kept(snapshots)}")


def _kept(snapshots: Snapshots | None) -> str:
    if snapshots is None or snapshots.safe is None:
        return "no state of an earlier step was kept; a lower lr may help"
    return (
        f"the state of step {snapshots.safe.step} was kept; dtrain resume --from STEP goes back further, "
        "a lower lr may help"
    )


def _update(
    parts: Parts,
    context: Context,
    lr: float,
    mean_loss: float,
    step: int,
    snapshots: Snapshots | None,
    scale: LossScale | None,
) -> tuple[float | None, bool]:
    """Clip and update, unless that would write something that is not a number into the weights.

    With a scaled loss the update is left out then, and the scale lowered if it may be to blame. Returns the norm of the
    gradients, None where it is not finite, and whether there was an update.
    """
    norm = _clipped(parts, context, scale)
    loss_finite = math.isfinite(mean_loss)
    finite = loss_finite and math.isfinite(norm)
    if not finite and (scale is None or scale.is_spent(loss_finite=loss_finite)):
        what = f"gradient norm is {norm}" if loss_finite else f"loss is {mean_loss}"
        raise TrainingDiverged(f"the {what} at step {step}; {_kept(snapshots)}")
    if finite:
        set_learning_rate(parts.optimizer, lr)
        if snapshots is not None:
            snapshots.update(parts.optimizer)  # once it waits for copies, so does whoever waits for the device
        else:
            parts.optimizer.step()
        if parts.average is not None:
            parts.average.follow()
    parts.optimizer.zero_grad(set_to_none=True)
    if scale is not None:
        scale.update(finite=finite, loss_finite=loss_finite)
    return norm if math.isfinite(norm) else None, finite


def _clipped(parts: Parts, context: Context, scale: LossScale | None) -> float:
    """Clip the gradients; returns their norm before, the scale of the loss taken out of both."""
    limit = parts.spec.training.max_grad_norm
    if parts.ends is not None:
        parts.ends.add_up()
    parameters = updated_by(parts.optimizer, parts.model)
    if scale is not None:
        unscale(parameters, scale.scale)
    if context.device_mesh is None:
        return float(clip_gradients(parameters, limit))
    shared = None
    if parts.ends is not None and parts.ends.parameter is not None:
        (shared,) = updated_of(parts.optimizer, [parts.ends.parameter])
    return clip_cut_gradients(parameters, limit, context.mesh, context.sum_over_ranks, shared)
