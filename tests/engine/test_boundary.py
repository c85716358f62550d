"""A thousand snapshots, each of the state at its own boundary, whatever changes while a slow copier copies it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import time

import numpy as np
import psutil
import pytest
import torch
from tests.engine.build import CPU, Ranks
from tests.engine.conftest import MakeRanks
from tests.engine.test_snapshot import stored
from torch import Tensor, nn

from dtrain.engine.snapshot import packs
from dtrain.engine.snapshot.copier import HostMover, Item
from dtrain.engine.snapshot.packs import Pack
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.snapshot.state import StateError, TrainState, random_states, tensor_bytes
from dtrain.tiers.memory.slots import MemoryDir

STEPS = 1000
SAVES = 2000


class Model(nn.Module):
    """BatchNorm, a 0-dim parameter, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.idle = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.norm(self.inner(x))).square().mean()


class Replacing(torch.optim.Optimizer):
    """Like Adam without its finer points: it puts new tensors in place of its moments and counters at every step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:  # as the engine does: what comes with the first step is there before it
            self.state[parameter] = {"mean": torch.zeros_like(parameter), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter]
                self.state[parameter] = {
                    "mean": 0.9 * kept["mean"] + 0.1 * parameter.grad,
                    "step": kept["step"] + 1,
                }
                parameter.sub_(self.state[parameter]["mean"], alpha=0.01)


class Slow(HostMover):
    """Lets the training thread run between any two slices."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def fill(self, pack: Pack) -> None:
        time.sleep(0.0001)
        super().fill(pack)

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        if self.random.random() < 0.1:
            time.sleep(0.0001)
        super().move(item, position, nbytes, target)


def at_the_boundary(state: TrainState) -> dict[str, bytes]:
    """Everything that a snapshot must hold, as it is now."""
    tensors = {name: bytes(tensor_bytes(tensor)) for name, tensor in (state.constant() | state.changing()).items()}
    return tensors | {f"{name} of 0": data for name, data in random_states(CPU).items()}


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer, member: Snapshots) -> None:
    """Forward and backward; buffers and all generators move on."""
    member.forward_window()
    x = torch.randn(4, 3) + random.random() + float(np.random.rand())
    loss = model(x)
    member.backward_window()
    loss.backward()


def job_of(ranks: MakeRanks, optimizer: str) -> tuple[TrainState, Ranks]:
    torch.manual_seed(1)
    model = Model()
    parameters = list(model.parameters())
    made: torch.optim.Optimizer
    if optimizer == "replacing":
        made = Replacing(parameters)
    else:
        made = torch.optim.AdamW(parameters, lr=1e-2)
        for parameter in parameters:
            if parameter is not model.idle:
                parameter.grad = torch.zeros_like(parameter)
        made.step()  # moments come with the first step; the parameter without a gradient never gets any
        made.zero_grad()
    state = TrainState(model, made)
    job = ranks(state, pace=Pace(forward_bytes=96, backward_bytes=128, slice_bytes=32), cadence=Cadence(1, 0, False))
    return state, job


def test_rows_41_and_42_a_thousand_of_a_thousand_snapshots_are_those_of_their_boundary(
    memory: MemoryDir, ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered at the boundary, as tiny tensors are, or put together in the windows, as larger ones are."""
    under_way = right = 0
    for optimizer, tiny_bytes in itertools.product(("adamw", "replacing"), (packs.TINY_BYTES, 0)):
        monkeypatch.setattr(packs, "TINY_BYTES", tiny_bytes)
        state, job = job_of(ranks, optimizer)
        (member,) = job.members
        member.copier.mover = Slow()
        for step in range(1, STEPS // 4 + 1):
            expected = at_the_boundary(state)
            member.take(step, {}, drain=False)
            one_pass(state.model, state.optimizer, member)
            under_way += member.copier.busy
            member.finish()
            member.superseded()
            right += stored(memory, step) == expected
            assert at_the_boundary(state) != expected, "buffers and generators have moved on"
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
        job.close()
    assert right == STEPS
    assert under_way > STEPS / 2, "the copies did last into the passes"


@pytest.mark.parametrize("of", ["idle", "inner.weight"])
def test_what_the_optimizer_begins_to_keep_later_is_refused_and_not_left_out(
    memory: MemoryDir, ranks: MakeRanks, of: str
) -> None:
    """The layout is made once: a moment of later on would be missing from every checkpoint."""
    state, job = job_of(ranks, "adamw")
    job.store(1)
    state.optimizer.state[state.model.get_parameter(of)]["late"] = torch.zeros(2)
    with pytest.raises(StateError, match="the optimizer keeps other tensors"):
        job.take(2)
    assert max(memory.whole()).step == 1


def test_row_44_two_thousand_saves_take_no_more_memory_and_no_more_files(memory: MemoryDir, ranks: MakeRanks) -> None:
    """The first save is as any other: everything is made before it."""
    _, job = job_of(ranks, "adamw")
    (member,) = job.members
    process = psutil.Process()
    job.store(1)  # the copier's thread has opened by now what it reads its own time from
    gc.collect()  # what earlier tests have left open is no part of it
    first = len(os.listdir("/proc/self/fd"))
    resident = []
    for step in range(2, SAVES + 1):
        member.take(step, {"data": {"samples": step}}, drain=False)
        member.forward_window()
        member.finish()
        member.superseded()
        if step % (SAVES // 5) == 0:
            assert len(os.listdir("/proc/self/fd")) <= first
            resident.append(process.memory_info().rss)
    grown = [after - before for before, after in itertools.pairwise(resident)]
    # what else the process does makes it jump once or twice; a leak is in every part
    assert min(grown) < 2**18, f"a leak of 700 bytes per save would show: {grown}"
    assert sorted(path.name for path in memory.path.glob("*.slot?")) == [slot.stem for slot in memory.slots(0, 1)]
