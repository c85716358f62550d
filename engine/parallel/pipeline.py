"""The decoder as a pipeline: its layers divided into stages, run by torch's schedules.

Stage s of p·v lies on rank s modulo p of the pipeline, so that with v = 1 each rank has one run of layers and with more
(interleaved, Narayanan et al. 2021, arXiv:2104.04473) several shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ...planners.models.activations import cuts_sequence
from ...planners.sharding.layers import layers_of_stages, stages_per_rank
from ...specs.datasets import TokenDataset
from ...specs.models import GptModel, Spec
from ..models.gpt import Gpt, GptPart, next_token_loss
from .precision import PASS_DTYPES

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Watcher(Protocol):
    """What is to happen around each pass."""

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward pass of one micro-batch."""

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward pass of one micro-batch."""


@dataclass(frozen=True)
class Part:
    """One stage, and what one micro-batch is where it enters and where it leaves it: tensors without memory."""

    module: nn.Module
    index: int
    entering: Tensor
    leaving: Tensor


@dataclass(frozen=True)
class Line:
    """The stages of a pipeline, as one rank has them."""

    parts: Sequence[Part]
    """This rank's, in the order of the stages."""
    total: int
    """Stages over all ranks."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of what leaves the last stage, for what `ends` holds it against."""
    ends: Callable[[Any], tuple[Tensor, Tensor]]
    """From a batch to what enters the first stage and what the loss needs beside the output of the last one."""


class ScaledLoss:
    """The loss of the last stage, times a factor."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """The factor is 1."""
        self.loss, self.factor = loss, 1.0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, scaled; in fp32, for fp16 has no room for the product."""
        return self.loss(output, targets).float() * self.factor


class Stage(PipelineStage):
    """A stage that tells when its passes begin and end: the windows of a pipeline's schedule."""

    watcher: Watcher

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass."""
        with self.watcher.forward():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """One backward pass."""
        with self.watcher.backward():
            super().backward_one_chunk(*args, **kwargs)


def split(model: Gpt, spec: Spec, pp_rank: int) -> Line:
    """Take out of the whole decoder the stages of one rank, and everything else out of `model`.

    The model stays the container in which parameters have their names; the stages hold the same modules.
    """
    assert isinstance(spec.model, GptModel)
    pp, each = spec.strategy.pp, stages_per_rank(spec.strategy)
    ranges = layers_of_stages(spec.model.n_layers, pp * each)
    mine = [pp_rank + turn * pp for turn in range(each)]
    parts = [_part(model, ranges[stage], first=stage == 0, last=stage == len(ranges) - 1) for stage in mine]
    kept = {str(layer) for stage in mine for layer in ranges[stage]}
    for number in [number for number in model.layers if number not in kept]:
        del model.layers[number]
    is_last = len(ranges) - 1 in mine
    if 0 not in mine and not (is_last and spec.model.tie_embeddings):  # there it gives the head its name
        model.embedding = None
    if not is_last:
        model.norm, model.head = None, None
    total = len(ranges)
    made = [
        Part(part, stage, *_shapes(spec, stage == 0, stage == total - 1))
        for stage, part in zip(mine, parts, strict=True)
    ]
    for part in made:
        length = part.leaving.shape[1] if part.index == total - 1 else _seq_len(spec)
        assert isinstance(part.module, GptPart)
        part.module.length = length
    return Line(made, total, next_token_loss, lambda tokens: (tokens[:, :-1], tokens[:, 1:]))


def _part(model: Gpt, layers: range, *, first: bool, last: bool) -> GptPart:
    part = GptPart(model.spec)
    part.layers.update({str(number): model.layers[str(number)] for number in layers})
    if first:
        part.embedding = model.embedding
    if last:
        part.norm, part.head = model.norm, model.head
    return part


def schedule_of(
    line: Line, spec: Spec, device: torch.device, group: ProcessGroup
) -> tuple[Schedule, list[Stage], ScaledLoss]:
    """The schedule of one step, this rank's stages, and the loss of the last one.

    The shapes that travel between stages are given: torch would else let the ranks send each other pickled ones.
    """
    stages = [
        Stage(
            part.module, part.index, line.total, device,
            input_args=part.entering, output_args=part.leaving, group=group,
        )
        for part in line.parts
    ]  # fmt: skip
    kind, n, loss = spec.strategy.pp_schedule, spec.micro_batches, ScaledLoss(line.loss)
    if kind == "interleaved-1f1b":
        return ScheduleInterleaved1F1B([*stages], n, loss_fn=loss), stages, loss
    made = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    return made(stages[0], n, loss_fn=loss), stages, loss


def _seq_len(spec: Spec) -> int:
    assert isinstance(spec.dataset, TokenDataset)
    return spec.dataset.seq_len


def _shapes(spec: Spec, first: bool, last: bool) -> tuple[Tensor, Tensor]:
    """What one micro-batch is where it enters and where it leaves a stage.

    Between layers it is as wide as the weights: autocast leaves the sums of the residual stream alone.
    """
    assert isinstance(spec.model, GptModel)
    samples, length = spec.training.micro_batch_size, _seq_len(spec)
    between = length // spec.strategy.tp if cuts_sequence(spec) else length
    wide = torch.bfloat16 if spec.training.precision == "bf16" else torch.float32
    hidden = torch.empty(samples, between, spec.model.d_model, dtype=wide, device="meta", requires_grad=True)
    entering = torch.empty(samples, length, dtype=torch.int64, device="meta") if first else hidden
    logits = (samples, length, spec.model.vocab_size)
    narrow = PASS_DTYPES[spec.training.precision]
    leaving = torch.empty(logits, dtype=narrow, device="meta", requires_grad=True) if last else hidden
    return entering, leaving
