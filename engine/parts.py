"""The parts of a training job, put together: model, data, optimizer, data parallel wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..specs.models import PythonModel, Spec, TextDataset
from .context import Context
from .data.build import Batches, build_samples
from .models.build import build_model, compute_loss, to_device
from .optim import build_optimizer
from .state import TrainState, seed_everything


@dataclass(frozen=True)
class Parts:
    """Everything a step needs."""

    spec: Spec
    model: nn.Module
    wrapped: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    batches: Batches
    fingerprint: str
    ties: dict[str, str]

    @property
    def state(self) -> TrainState:
        """Model and optimizer as named tensors."""
        return TrainState(self.model, self.optimizer)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens that one step trains on; None where samples are not runs of tokens."""
        dataset = self.spec.dataset
        return self.spec.training.global_batch_size * dataset.seq_len if isinstance(dataset, TextDataset) else None

    def batch(self, samples: int, micro: int, context: Context) -> Any:
        """The micro-batch of this rank in pass `micro` after `samples` samples were seen."""
        return to_device(self.batches.get(samples, micro), context.device)

    def loss(self, batch: Any, context: Context) -> Tensor:
        """Forward pass: the mean loss over the micro-batch."""
        with context.autocast(self.spec.training.precision):
            return compute_loss(self.wrapped, batch)


def assemble(spec: Spec, context: Context) -> Parts:
    """Build everything from the spec, the same weights on every rank."""
    seed_everything(spec.seed)
    model = build_model(spec.model).to(context.device)
    samples = build_samples(spec.dataset)
    batches = Batches(
        samples,
        seed=spec.seed,
        global_batch=spec.training.global_batch_size,
        micro_batch=spec.training.micro_batch_size,
        rank=context.rank,
        world=context.world,
    )
    wrapped = DistributedDataParallel(
        model,
        device_ids=[context.local_rank] if context.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=isinstance(spec.model, PythonModel),
    )
    optimizer = build_optimizer(model, spec.training.optimizer)
    parts = Parts(spec, model, wrapped, optimizer, batches, batches.fingerprint(), TrainState(model, optimizer).ties())
    _warm_up(parts, context)
    seed_everything(spec.seed, context.rank)
    return parts


def _warm_up(parts: Parts, context: Context) -> None:
    """Make one pass whose result is thrown away.

    DDP regroups its gradient buckets after the first backward pass, and the grouping decides the order of summation
    in the ring. With the regrouping done before step 1 of every attempt, a resumed run sums as the unbroken one does.
    """
    buffers = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
    for _ in range(2):  # the second forward pass is where the buckets are regrouped
        parts.loss(parts.batch(0, 0, context), context).backward()
        context.beat()
    parts.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in parts.model.named_buffers():
            buffer.copy_(buffers[name])
