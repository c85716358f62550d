"""The parts of a training job, put together: model, data, optimizer, data parallel wrapper."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from ...planners.sharding.mesh import ALONE, Mesh
from ...specs.datasets import TokenDataset
from ...specs.models import GptModel, PythonModel, Spec
from ...tiers.format.digest import digest
from ...tiers.format.jsonfile import dumps
from ...tiers.memory.heartbeat import Phase
from ..data.build import Batches, HeldOut, build_data
from ..data.text import DataError
from ..models.build import build_model, compute_loss, to_device
from ..models.gpt import Gpt
from ..optim.masters import lower
from ..optim.optimizers import Average, build_optimizer
from ..parallel import own
from ..parallel.context import Context
from ..parallel.ends import Ends
from ..parallel.pipeline import schedule_of
from ..parallel.wrap import Spread, fill, replicated, spread
from ..snapshot.state import StateError, TrainState, same_bytes, seed_everything
from .passes import Loop, Passes, Pipeline, Unwatched, Watch


@dataclass(frozen=True)
class Parts:
    """Everything a step needs."""

    spec: Spec
    model: nn.Module
    passes: Passes
    optimizer: torch.optim.Optimizer
    batches: Batches
    fingerprint: str
    moving: frozenset[str] = frozenset()
    held_out: HeldOut | None = None
    mesh: Mesh = ALONE
    rank: int = 0
    ends: Ends | None = None

    @property
    def state(self) -> TrainState:
        """Model and optimizer as named tensors."""
        return TrainState(self.model, self.optimizer, self.moving, self.mesh, self.rank, self.ends)

    @cached_property
    def ties(self) -> dict[str, str]:
        """Further names of shared parameters → the name they are stored under."""
        return self.state.ties()

    @cached_property
    def data_digest(self) -> str:
        """A hash of what the spec says of the data that is trained on."""
        said: dict[str, Any] = {"dataset": self.spec.dataset.model_dump(mode="json"), "seed": self.spec.seed}
        if self.spec.evaluation is not None and self.spec.evaluation.held_out:
            said["held_out"] = self.spec.evaluation.held_out
        return digest(dumps(said))

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens that one step trains on; None where samples are not runs of tokens."""
        return self.tokens_in(self.spec.training.global_batch_size)

    def tokens_in(self, samples: int) -> int | None:
        """Tokens in so many samples; None where samples are not runs of tokens."""
        dataset = self.spec.dataset
        return samples * dataset.seq_len if isinstance(dataset, TokenDataset) else None

    @cached_property
    def average(self) -> Average | None:
        """The average of the weights, where the spec wants one."""
        decay = self.spec.training.ema_decay
        return None if decay is None else Average(self.optimizer, decay)

    def batch(self, samples: int, micro: int, context: Context) -> Any:
        """The micro-batch of this rank in pass `micro` after `samples` samples were seen."""
        return to_device(self.batches.get(samples, micro), context.device)

    def run(self, samples: int, context: Context, watch: Watch | Unwatched) -> Tensor | None:
        """All passes of the step after `samples` samples; returns the mean loss over them where it is known."""
        count = self.spec.micro_batches
        batches = (self.batch(samples, micro, context) for micro in range(count))
        return self.passes.run(batches, count, watch, lambda: context.autocast(self.spec.training.precision))


def assemble(spec: Spec, context: Context) -> Parts:
    """Build everything from the spec, the same weights on every rank."""
    context.enter(Phase.MODEL)
    seed_everything(spec.seed)
    by_name = isinstance(spec.model, GptModel)
    with torch.device("meta") if by_name else contextlib.nullcontext():
        model = build_model(spec.model)
    if not by_name:
        model = model.to(context.device)
    if spec.training.precision == "bf16":
        lower(model)
    context.enter(Phase.DATA)
    samples, others = build_data(spec)
    batches = Batches(
        samples,
        seed=spec.seed,
        global_batch=spec.training.global_batch_size,
        micro_batch=spec.training.micro_batch_size,
        rank=context.data_rank,
        world=context.mesh.data_parallel,
    )
    held_out = None
    if spec.evaluation is not None and others is not None:
        held_out = HeldOut(others, spec.evaluation, seed=spec.seed, micro_batch=spec.training.micro_batch_size)
    context.enter(Phase.PARTS)
    line = None
    if not by_name and context.device_mesh is not None:
        batch = to_device(batches.get(0, 0), context.device)
        _check_can_be_cut(model, spec, batch, context)
        if context.mesh.tp * context.mesh.pp > 1:
            place = context.mesh.place(context.rank)["pp"]
            precision = partial(context.autocast, spec.training.precision)
            line = own.cut(model, spec, context.device_mesh["tp"], place, batch, precision)
    spread_out = spread(model, spec, context.mesh, context.device_mesh, context.rank, line)
    if by_name:
        fill(spread_out, spec, context.mesh, context.device, context.rank)
    ends = Ends.of(model, context.mesh, context.rank) if spread_out.tied_ends and isinstance(model, Gpt) else None
    training = spec.training
    optimizer = build_optimizer(
        model, training.optimizer, ema=training.ema_decay is not None, masters=training.precision == "bf16"
    )
    TrainState(model, optimizer).check_storable()
    passes = _passes(spread_out, spec, context)
    parts = Parts(
        spec, model, passes, optimizer, batches, batches.fingerprint(),
        held_out=held_out, mesh=context.mesh, rank=context.rank, ends=ends,
    )  # fmt: skip
    _check_same_data(parts, context)
    context.enter(Phase.FIRST_PASSES)
    parts = replace(parts, moving=_warm_up(parts, context))
    seed_everything(spec.seed, context.draws_as)
    return parts


def _passes(found: Spread, spec: Spec, context: Context) -> Passes:
    if context.device_mesh is None:
        return Loop(replicated(found.model, spec))
    if found.line is None:
        return Loop(found.model)
    group = context.device_mesh["pp"].get_group()
    return Pipeline(found.model, found.line, *schedule_of(found.line, spec, context.device, group))


def _check_same_data(parts: Parts, context: Context) -> None:
    """Raise DataError when another rank sees other data: its samples would not be the ones this rank leaves to it."""
    halves = [int(parts.fingerprint[start : start + 4], 16) for start in (0, 4)]
    sums = context.sum_over_ranks([float(number) for half in halves for number in (half, half * half)])
    for total, squares in zip(sums[::2], sums[1::2], strict=True):
        # (sum x)^2 = n sum x^2 only if all x are equal; 16 bits each, so the sums are exact in float64.
        if int(total) ** 2 != context.world * int(squares):
            raise DataError("the ranks do not see the same data: is something writing to it?")


def _warm_up(parts: Parts, context: Context) -> frozenset[str]:
    """Make two passes whose results are thrown away; returns the parameters that the forward pass itself changed.

    DDP regroups its gradient buckets after the first backward pass, and the grouping decides the order of summation
    in the ring. With the regrouping done before step 1 of every attempt, a resumed run sums as the unbroken one does.
    """
    model = parts.model
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if isinstance(parts.spec.model, PythonModel) and context.device_mesh is None:
        kept |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        _stir(model)
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    batch = parts.batch(0, 0, context)
    count = parts.spec.micro_batches if parts.mesh.pp > 1 else 1  # a schedule is made for a number of passes
    for _ in range(2):  # the second forward pass is where the buckets are regrouped
        precision = partial(context.autocast, parts.spec.training.precision)
        parts.passes.run(repeat(batch), count, Unwatched(context), precision)
        parts.optimizer.zero_grad(set_to_none=True)  # they hold the old buckets, which would lie beside the new ones
        context.beat()
    moved = {name for name, parameter in model.named_parameters() if parameter._version != versions[name]}
    return frozenset(f"model.{name}" for name in moved | _put_back(model, kept))


def _check_can_be_cut(model: nn.Module, spec: Spec, batch: Any, context: Context) -> None:
    """Raise StateError for a model of one's own that cutting would harm in silence, or that FSDP2 does not take.

    What a forward pass writes into a parameter is lost when the layer is divided again; so one pass is made before.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and context.mesh.data_parallel > 1:
            raise StateError(f"model.{name} is a single number, which dp_shard cannot divide: give it the shape [1]")
    kept = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    _stir(model)
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    with torch.no_grad(), context.autocast(spec.training.precision):
        compute_loss(model, batch)
    moved = {name for name, parameter in model.named_parameters() if parameter._version != versions[name]}
    if changed := sorted(moved | _put_back(model, kept)):
        raise StateError(
            f"the model changes model.{changed[0]} in its forward pass, which is lost where dp_shard, tp or pp divide "
            "it: keep it in a buffer (register_buffer), or use dp_replicate alone"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard takes no others


def _stir(model: nn.Module) -> None:
    """Change every trained weight a little, so that a teacher which begins as their copy is seen to follow them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.mul_(1.001).add_(1e-4)


def _put_back(model: nn.Module, kept: dict[str, Tensor]) -> set[str]:
    """Undo what the passes did to buffers and parameters; returns the names of untrained parameters among them."""
    changed = set()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            before = kept.get(name)
            if before is None or same_bytes(before, tensor):
                continue
            if before.shape != tensor.shape or before.dtype != tensor.dtype:
                raise StateError(
                    f"model.{name} was {before.dtype} {list(before.shape)} and is {tensor.dtype} {list(tensor.shape)} "
                    "after a forward pass; a tensor whose shape changes cannot be stored"
                )
            tensor.copy_(before)
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                changed.add(name)
    return changed
