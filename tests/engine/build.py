"""Models in every form a tensor can have, and ranks that share one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.engine.optim.optimizers import build_optimizer
from dtrain.engine.snapshot.copier import HostMover, Item
from dtrain.engine.snapshot.device import Side
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.snapshot.state import TrainState, seed_everything, tensor_bytes
from dtrain.planners.sharding.mesh import Mesh
from dtrain.specs.models import AdamW, GptModel, Sgd, Spec
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place

RUN_ID = "feed"
CPU = torch.device("cpu")
ADAMW = AdamW(name="adamw", lr=1e-2)


class Plain(nn.Module):
    """Two layers with dropout and batch norm, so that buffers and generators change in a forward pass."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.25)
        self.outer = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.norm(self.inner(x))))
        return F.mse_loss(self.outer(hidden), x.sum(dim=1, keepdim=True))


class Odd(nn.Module):
    """Tensors that do not lie row by row, that hold nothing, that are one number, that are short floats."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.number = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0))
        self.two_of_nothing = nn.Parameter(torch.randn(2, 0))
        self.short = nn.Parameter(torch.randn(6, 3).bfloat16())
        self.inside = nn.Parameter(torch.randn(9, 2)[3:6])
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("stripes", torch.randn(4, 6)[:, ::2])
        self.register_buffer("empty", torch.zeros(3, 0))
        self.register_buffer("eight", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)


class Tied(nn.Module):
    """A head that is the embedding, or one that only looks like it."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def mlp(**kwargs: Any) -> nn.Module:
    """The entry that specs of these tests name."""
    return Plain(**kwargs)


def gpt(**changes: Any) -> GptModel:
    """A small decoder's spec."""
    return GptModel.model_validate(
        {"type": "gpt", "n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 64, **changes}
    )


def job_spec(**changes: Any) -> Spec:
    """A small job of one worker with the model above; `training` is merged."""
    values: dict[str, Any] = {
        "output_dir": "runs/t",
        "seed": 7,
        "max_steps": 8,
        "model": {"type": "python", "entry": "tests.engine.build:mlp"},
        "dataset": {"type": "python", "entry": "tests.engine.build:points"},
        "training": {
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "optimizer": {"name": "adamw", "lr": 1e-2},
            "scheduler": {"name": "cosine", "warmup_steps": 2},
        },
        "cluster": {"device": "cpu"},
    }
    values["training"] |= changes.pop("training", {})
    return Spec.model_validate(values | changes)


class points:  # noqa: N801  (stands where a spec names a function)
    """Sample i as a fixed random vector."""

    def __init__(self, samples: int = 48) -> None:
        self.values = torch.randn(samples, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


def state_of(model: nn.Module, optimizer: AdamW | Sgd = ADAMW) -> TrainState:
    return TrainState(model, build_optimizer(model, optimizer))


def update(state: TrainState, seed: int) -> None:
    """One optimizer update with gradients that lie like their parameters; the global generators stay as they are."""
    source = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        drawn = torch.randn(parameter.shape, generator=source)
        parameter.grad = torch.empty_like(parameter).copy_(drawn)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def scramble(state: TrainState, seed: int) -> None:
    """Overwrite all tensors, buffers too."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (state.constant() | state.changing()).values():
            tensor.copy_((torch.rand(tensor.shape, generator=source) * 100).to(tensor.dtype))


def content(state: TrainState) -> dict[str, bytes]:
    """The row-major bytes of everything, by name."""
    return {name: bytes(tensor_bytes(tensor)) for name, tensor in (state.constant() | state.changing()).items()}


def in_memory(memory: MemoryDir, step: int, attempt: int = 1) -> Candidate:
    return Candidate(Version(attempt=attempt, step=step), Place("memory", str(memory.path)))


@dataclass
class Ranks:
    """The ranks of one attempt, one after the other in this process, over the same model."""

    state: TrainState
    memory: MemoryDir
    world: int = 1
    attempt: int = 1
    restored: Version | None = None
    pace: Pace = field(default_factory=lambda: Pace(64, 64, 48))
    cadence: Cadence = field(default_factory=lambda: Cadence(1, 0, False))
    alive: Callable[[], None] = lambda: None
    side: Side | None = None

    def __post_init__(self) -> None:
        self.members = [
            Snapshots(
                replace(self.state, mesh=Mesh(dp_replicate=self.world), rank=rank),
                self.memory, run_id=RUN_ID, attempt=self.attempt, device=CPU, cadence=self.cadence,
                pace=self.pace, restored=self.restored, alive=self.alive, side=self.side,
            )
            for rank in range(self.world)
        ]  # fmt: skip

    def take(self, step: int, *, drain: bool = False) -> None:
        """Every rank takes on its snapshot; each has generators of its own."""
        for member in self.members:
            seed_everything(step, member.rank)
            member.take(step, {"ties": self.state.ties(), "data": {"samples": step * 16}}, drain=drain)

    def finish(self) -> None:
        for member in self.members:
            member.finish()
        for member in self.members:
            member.superseded()

    def store(self, step: int, *, drain: bool = False) -> None:
        self.take(step, drain=drain)
        self.finish()

    def close(self) -> None:
        for member in self.members:
            member.close()


class GatedMover(HostMover):
    """Moves nothing before it is let through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.moved: list[int] = []

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        assert self.gate.wait(timeout=10)
        super().move(item, position, nbytes, target)
        self.moved.append(nbytes)
