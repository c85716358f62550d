"""All forward and backward passes of one step, with the copy of the step before in their windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...tiers import faults
from ..data.text import DataError
from ..models.build import compute_loss
from ..parallel.context import Context
from ..parallel.pipeline import Line, ScaledLoss, Schedule, Stage
from ..snapshot.snapshots import Snapshots
from ..timing import StepClock

Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Watch:
    """What happens around each pass: a sign of life, a window for the copy, a fault to try, a look at the clock."""

    context: Context
    snapshots: Snapshots | None
    clock: StepClock
    step: int

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass of one micro-batch."""
        self.context.beat()
        if self.snapshots is not None:
            self.snapshots.forward_window()
        with self.clock.part("forward"):
            faults.point("window.forward", self.step)
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass of one micro-batch."""
        self.context.beat()
        if self.snapshots is not None:
            self.snapshots.backward_window()
        with self.clock.part("backward"):
            faults.point("window.backward", self.step)
            yield

    def loading(self) -> AbstractContextManager[None]:
        """Around the wait for a batch."""
        return self.clock.waiting("data")


class Unwatched:
    """Nothing happens around a pass but a sign of life: for passes whose results are thrown away."""

    def __init__(self, context: Context) -> None:
        """Give signs of life for this worker."""
        self.context = context

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward pass."""
        self.context.beat()
        return contextlib.nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward pass."""
        self.context.beat()
        return contextlib.nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Around the wait for a batch."""
        return contextlib.nullcontext()


class Passes(Protocol):
    """How this rank gets from batches to gradients."""

    wrapped: nn.Module
    """What is called for a loss; in a pipeline its container only."""
    scale: float
    """Factor of the loss whose gradients are wanted."""

    def run(self, batches: Iterator[Any], count: int, watch: Watch | Unwatched, precision: Precision) -> Tensor | None:
        """Add up the gradients of the mean loss over `count` micro-batches, times `scale`.

        Returns that loss, not scaled, where it is known.
        """

    def judge(self, batch: Any, precision: Precision) -> Tensor | None:
        """The mean loss of one micro-batch by a forward pass alone, where it is known; without gradients."""


class Loop(Passes):
    """One micro-batch after the other through the whole model."""

    def __init__(self, wrapped: nn.Module) -> None:
        """Run this module; DDP exchanges gradients in the last pass only."""
        self.wrapped, self.scale = wrapped, 1.0

    def run(self, batches: Iterator[Any], count: int, watch: Watch | Unwatched, precision: Precision) -> Tensor:
        """As `Passes.run`; the loss is this rank's."""
        total: Tensor | None = None
        for number in range(count):
            with watch.loading():
                batch = next(batches)
            with self._exchange(last=number == count - 1):
                with watch.forward(), precision():
                    loss = compute_loss(self.wrapped, batch) / count
                with watch.backward():
                    (loss if self.scale == 1.0 else loss.float() * self.scale).backward()  # fp16 has no room for it
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def judge(self, batch: Any, precision: Precision) -> Tensor:
        """As `Passes.judge`; not by DDP, which would send buffers to all."""
        model = self.wrapped.module if isinstance(self.wrapped, DistributedDataParallel) else self.wrapped
        with precision():
            return compute_loss(model, batch)

    def _exchange(self, *, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()


class Pipeline(Passes):
    """All micro-batches of a step through this rank's stages, in the order of a schedule."""

    def __init__(
        self, model: nn.Module, line: Line, schedule: Schedule, stages: Sequence[Stage], loss: ScaledLoss
    ) -> None:
        """`model` holds the modules of the stages under their names."""
        self.wrapped, self.line, self.schedule, self.stages, self.loss = model, line, schedule, stages, loss
        self.scale = 1.0
        self.first = any(stage.is_first for stage in stages)
        self.last = any(stage.is_last for stage in stages)

    def run(self, batches: Iterator[Any], count: int, watch: Watch | Unwatched, precision: Precision) -> Tensor | None:
        """As `Passes.run`; the loss is known on the last stage."""
        pairs = [self.line.ends(next(batches)) for _ in range(count)]
        entering, targets = (torch.cat(halves) for halves in zip(*pairs, strict=True))
        for stage in self.stages:
            stage.watcher = watch
        losses: list[Tensor] = []
        self.loss.factor = self.scale
        inputs = (entering,) if self.first else ()
        target: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        with precision():
            self.schedule.step(*inputs, return_outputs=False, **target)
        return torch.stack([loss.detach() for loss in losses]).mean() / self.scale if self.last else None

    def judge(self, batch: Any, precision: Precision) -> Tensor | None:
        """As `Passes.judge`: from stage to stage; the loss is known on the last one.

        Not by the schedule, which is made for a step's number of micro-batches.
        """
        x, targets = self.line.ends(batch)
        loss = None
        for part, stage in zip(self.line.parts, self.stages, strict=True):
            if not stage.is_first:
                x = torch.empty(part.entering.shape, dtype=part.entering.dtype, device=stage.device)
                dist.recv(x, group=stage.group, group_src=(part.index - 1) % stage.group_size)
            elif x.shape != part.entering.shape:
                raise DataError(
                    f"a pipeline is made for batches of shape {list(part.entering.shape)}, and evaluation has one of "
                    f"{list(x.shape)}"
                )
            with precision():
                x = part.module(x)
                loss = self.line.loss(x, targets) if stage.is_last else None
            if not stage.is_last:
                dist.send(x.contiguous(), group=stage.group, group_dst=(part.index + 1) % stage.group_size)
            for module in part.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a pipeline's stay together until their backward pass
        return loss
