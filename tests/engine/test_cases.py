"""Checkpoints of model and optimizer that went wrong elsewhere: each case is a row of section E of the list."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.engine.build import (
    CPU,
    RUN_ID,
    Plain,
    Tied,
    content,
    in_memory,
    job_spec,
    points,
    scramble,
    state_of,
    update,
)
from tests.engine.conftest import MakeRanks
from tests.engine.test_step import Run
from torch import Tensor, nn

from dtrain.engine.optim.optimizers import learning_rate
from dtrain.engine.parallel.context import Context, StopFlag
from dtrain.engine.restore.catalogue import whole_here
from dtrain.engine.restore.restore import restore
from dtrain.engine.snapshot.state import StateError, TrainState
from dtrain.tiers.format.shardfile import MAX_HEADER, PAGE, Entry, Shard, ShardReader, TooManyTensors, parse_header
from dtrain.tiers.memory.heartbeat import Heartbeat
from dtrain.tiers.memory.slots import MemoryDir, Slot

pytestmark = pytest.mark.usefixtures("group")

Begin = Callable[..., Run]


@pytest.fixture
def begin(memory: MemoryDir) -> Begin:
    context = Context(0, 0, 1, CPU, StopFlag(), Heartbeat(memory, 0))
    return lambda attempt=1, **changes: Run(job_spec(**changes), context, memory, attempt)


def load(state: TrainState, memory: MemoryDir, step: int) -> None:
    restore(state, whole_here(state), [in_memory(memory, step)], 0, lambda mine: mine)


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"name": "constant"},
    "warm-up": {"name": "constant", "warmup_steps": 5},
    "linear": {"name": "linear", "warmup_steps": 3, "min_lr_ratio": 0.1},
    "cosine": {"name": "cosine", "warmup_steps": 3},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_row_56_the_learning_rate_goes_on_where_it_was_wherever_the_run_stops(begin: Begin, name: str) -> None:
    job = {"max_steps": 12, "training": {"scheduler": SCHEDULES[name]}}
    whole = begin(**job)
    whole.train(12)
    rates = [m["lr"] for m in whole.metrics]
    assert name == "constant" or len(set(rates)) > 3
    first = begin(**job)
    first.train(1)
    for step in range(1, 12):
        attempt = step + 1
        again = begin(attempt, **job)
        again.restore(step, attempt - 1)
        assert [group["lr"] for group in again.parts.optimizer.param_groups] == [1e-2] * 2, "none comes from the file"
        again.train(step + 1)
        assert (again.metrics[0]["lr"], again.metrics[0]["loss"]) == (rates[step], whole.metrics[step]["loss"])
        first = again
    assert content(first.parts.state) == content(whole.parts.state)


@pytest.mark.parametrize("name", SCHEDULES)
def test_row_56_a_later_end_stretches_the_schedule_from_the_next_step_on(begin: Begin, name: str) -> None:
    """The rates after the resume are those of a run that was to end there from the beginning."""
    training = {"scheduler": SCHEDULES[name]}
    first, longer = begin(max_steps=8, training=training), begin(2, max_steps=20, training=training)
    first.train(6)
    longer.restore(6)
    longer.train(20)
    spec = longer.spec.training
    rates = [learning_rate(step, spec.optimizer.lr, spec.scheduler, 20) for step in range(7, 21)]
    assert [m["lr"] for m in longer.metrics] == rates
    assert name in ("constant", "warm-up") or rates[0] > first.metrics[-1]["lr"] * 0.5


class Noisy(points):
    """Samples with noise from each of the generators that people draw theirs from."""

    drawn: ClassVar[list[tuple[float, ...]]] = []

    def __getitem__(self, index: int) -> Tensor:
        noise = (random.random(), float(np.random.rand()), float(torch.rand(())))
        Noisy.drawn.append(noise)
        return super().__getitem__(index) + torch.tensor([*noise, 0.0])


@pytest.mark.parametrize("stop", [1, 3])
def test_row_85_what_data_draw_is_never_drawn_again_and_goes_on_where_it_was(begin: Begin, stop: int) -> None:
    """16 samples in an epoch: each is drawn for anew in every one, and after a resume as without it."""
    job = {"dataset": {"type": "python", "entry": "tests.engine.test_cases:Noisy", "kwargs": {"samples": 16}}}
    whole = begin(**job)
    Noisy.drawn.clear()
    whole.train(6)
    drawn = [*Noisy.drawn]
    assert len(drawn) == 6 * 16
    for generator in zip(*drawn, strict=True):
        assert len(set(generator)) == len(drawn)
    first = begin(**job)
    first.train(stop)
    again = begin(2, **job)
    again.restore(stop)
    Noisy.drawn.clear()
    again.train(6)
    assert Noisy.drawn == drawn[stop * 16 :]
    assert again.losses == whole.losses[stop:]


@pytest.mark.parametrize("stop", range(1, 6))
def test_passes_that_reach_over_an_epoch_s_end_are_added_up_as_any_other(begin: Begin, stop: int) -> None:
    """24 samples a step in 6 passes, of 43: most steps hold the end of an epoch, in the middle of a pass."""
    job = {
        "dataset": {"type": "python", "entry": "tests.engine.build:points", "kwargs": {"samples": 43}},
        "training": {"global_batch_size": 24, "micro_batch_size": 4},
    }
    whole = begin(**job)
    assert whole.spec.micro_batches == 6
    whole.train(6)
    first = begin(**job)
    first.train(stop)
    again = begin(2, **job)
    again.restore(stop)
    again.train(6)
    assert [*first.losses, *again.losses] == whole.losses
    assert content(again.parts.state) == content(whole.parts.state)


def test_row_61_moments_are_stored_whether_gradients_are_still_there_or_not(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    state = state_of(Plain())
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    assert all(parameter.grad is not None for parameter in state.model.parameters())
    ranks(state, 2).store(1)
    again = state_of(Plain())
    scramble(again, 5)
    load(again, memory, 1)
    assert content(again) == content(state)
    kept = again.optimizer.state[again.model.inner.weight]
    assert kept["exp_avg"].all()
    assert kept["step"] == 1


class Views(nn.Module):
    """Two parameters in one storage, a third that overlaps with both, and a buffer in it, too."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(6, 4)
        self.upper, self.lower = nn.Parameter(base[:3]), nn.Parameter(base[3:])
        self.middle = nn.Parameter(base[2:4], requires_grad=False)
        self.register_buffer("last", base[5])

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ (self.upper + self.lower).t()).square().mean() - 1).square()


class Adapter(nn.Module):
    """A frozen tied model and a small trained one on it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Tied(True).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.down(x))
        return (x @ self.base.head.weight.t()).square().mean()


@pytest.mark.parametrize("entry", ["Views", "Adapter"])
def test_row_65_what_shares_memory_is_stored_and_comes_back(begin: Begin, entry: str) -> None:
    job = {"model": {"type": "python", "entry": f"tests.engine.test_cases:{entry}"}}
    whole = begin(**job)
    whole.train(6)
    first = begin(**job)
    first.train(3)
    again = begin(2, **job)
    again.restore(3)
    again.train(6)
    assert again.losses == whole.losses[3:]
    assert content(again.parts.state) == content(whole.parts.state)
    if entry == "Adapter":
        assert again.parts.ties == {"model.base.head.weight": "model.base.embedding.weight"}
        assert not any(name.startswith("optimizer.base.") for name in content(again.parts.state))


class Small(nn.Module):
    """Tensors of no element and of one, and one that is smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(()))
        self.none, self.none_too = nn.Parameter(torch.randn(0)), nn.Parameter(torch.randn(0))
        self.two_of_none, self.none_of_two = nn.Parameter(torch.randn(2, 0)), nn.Parameter(torch.randn(0, 2))
        self.few = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("nothing", torch.zeros(0))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_row_67_tensors_of_nothing_and_of_one_number_come_back(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    state = state_of(Small())
    update(state, 1)
    job = ranks(state, world)
    job.store(1)
    again = state_of(Small())
    scramble(again, 5)
    load(again, memory, 1)
    assert content(again) == content(state)
    for rank, member in enumerate(job.members):
        (record,) = [record for record in memory.whole()[next(iter(memory.whole()))] if record.rank == rank]
        path = Slot(memory.path, rank, world, record.slot).file
        with ShardReader(path) as reader, safe_open(path, "pt") as theirs:
            assert set(theirs.keys()) == {entry.name for entry in reader.shard.entries}
            assert reader.shard == member.shard


def header_of(count: int, letters: int) -> tuple[Shard, int]:
    """A shard of so many one-number tensors with names of so many letters, and its header's bytes."""
    entries = tuple(Entry(f"{number:0{letters}}", "F32", (1,), (0,), (1,), 4) for number in range(count))
    shard = Shard(0, 1, RUN_ID, entries)
    return shard, len(shard.header())


def test_row_68_as_many_tensors_as_other_readers_take_and_not_one_more() -> None:
    """The limit is that of the safetensors library; above it a file would be written that nobody can read."""
    assert MAX_HEADER == 100_000_000
    (_, short), (_, longer) = header_of(100, 6000), header_of(200, 6000)
    fitting = 100 * MAX_HEADER // (longer - short) - 10
    shard, nbytes = header_of(fitting, 6000)
    assert MAX_HEADER * 0.99 < nbytes <= MAX_HEADER
    assert len(parse_header(shard.header()[8:], "x").entries) == fitting
    with pytest.raises(TooManyTensors, match=rf"^{fitting + 20} tensors on rank 0 make a header of .* MB, .* 100 MB"):
        header_of(fitting + 20, 6000)


def test_row_68_it_is_refused_before_the_first_step(
    memory: MemoryDir, ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.tiers.format.shardfile.MAX_HEADER", PAGE)
    state = state_of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))))
    with pytest.raises(StateError, match=r"^243 tensors on rank 0 make a header of"):
        ranks(state)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_row_76_rates_are_the_specs_and_dtypes_stay_as_they_were(begin: Begin, precision: str) -> None:
    def job(lr: float, precision: str = precision) -> dict[str, Any]:
        optimizer = {"name": "adamw", "lr": lr, "weight_decay": lr}
        return {"training": {"precision": precision, "optimizer": optimizer, "scheduler": {"name": "constant"}}}

    first = begin(**job(1e-2))
    first.train(3)
    again = begin(2, **job(1e-3))
    again.restore(3)
    again.train(4)
    assert again.metrics[0]["lr"] == 1e-3
    assert sorted(group["weight_decay"] for group in again.parts.optimizer.param_groups) == [0.0, 1e-3]
    dtypes = {name: tensor.dtype for name, tensor in again.parts.state.constant().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in first.parts.state.constant().items()}
    narrow = torch.bfloat16 if precision == "bf16" else torch.float32
    assert dtypes["model.inner.weight"] == narrow
    assert dtypes["optimizer.inner.weight.exp_avg"] == torch.float32
    other = begin(3, **job(1e-2, "fp32" if precision == "bf16" else "bf16"))
    with pytest.raises(StateError, match=r"model\.inner\.weight"):
        other.restore(3)
