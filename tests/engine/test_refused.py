"""Row 75: a state that holds NaN or infinity never becomes the newest good one, and the good ones stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.build import CPU, RUN_ID, Plain, Ranks, content, job_spec, state_of
from tests.engine.conftest import MakeRanks
from tests.engine.test_snapshot import drain_marks, state_part, stored
from torch import Tensor, nn

from dtrain.engine.parallel.context import Context, StopFlag
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.training.parts import assemble
from dtrain.engine.training.step import Progress, StepOutcome, TrainingDiverged, settle, train_step
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.heartbeat import Heartbeat
from dtrain.tiers.memory.slots import MemoryDir

SPOILT = [
    "model.inner.weight",
    "model.outer.bias",
    "optimizer.norm.weight.exp_avg",
    "optimizer.inner.bias.exp_avg_sq",
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", SPOILT)
def test_row_75_a_state_that_is_not_finite_is_kept_by_no_rank(
    memory: MemoryDir, ranks: MakeRanks, name: str, world: int
) -> None:
    state = state_of(Plain())
    job = ranks(state, world)
    job.store(1, drain=True)
    expected = stored(memory, 1)
    good = state.constant()[name].clone()
    with torch.no_grad():
        state.constant()[name].view(-1)[-1] = float("nan")
    for step in range(2, 9):
        job.take(step, drain=True)
        for member in job.members:
            member.finish()
        (tensor,) = [member.refused for member in job.members if member.refused is not None]
        for member in job.members:
            refused = member.refuse(tensor)
            assert (refused.tensor, refused.version) == (name, Version(1, step))
            assert member.safe == Version(1, 1)
        assert set(memory.whole()) == {Version(1, 1)}
        assert drain_marks(memory) == {1}, "what is never whole does not stay pinned"
        assert stored(memory, 1) == expected
    with torch.no_grad():
        state.constant()[name].copy_(good)
    job.store(9)
    assert max(memory.whole()) == Version(1, 9)
    assert state_part(stored(memory, 9)) == content(state)


def test_buffers_and_frozen_weights_may_hold_infinity(memory: MemoryDir, ranks: MakeRanks) -> None:
    """As masks of attention do; no update can have put it there."""

    class Masked(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), -float("inf")).triu(1))
            self.frozen = nn.Parameter(torch.tensor([float("inf")]), requires_grad=False)

    state = state_of(Masked())
    ranks(state, 2).store(1)
    assert state_part(stored(memory, 1)) == content(state)


def test_a_step_that_fails_does_not_save_what_is_not_finite(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state)
    job.store(1)
    with torch.no_grad():
        state.model.outer.weight.fill_(float("inf"))
    job.take(2)
    job.members[0].salvage()
    assert set(memory.whole()) == {Version(1, 1)}


class Together:
    """The ranks of one job as threads of this process; `gather_bytes` is theirs together."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world)
        self.given = [b""] * world

    def context(self, rank: int) -> Any:
        def gather_bytes(data: bytes) -> list[bytes]:
            self.given[rank] = data
            self.barrier.wait(timeout=10)
            gathered = list(self.given)
            self.barrier.wait(timeout=10)
            return gathered

        return SimpleNamespace(rank=rank, world=self.world, gather_bytes=gather_bytes)

    def do(self, work: Callable[[int], object]) -> list[Any]:
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            results[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        return results


@pytest.mark.parametrize("spoilt", [SPOILT[:1], SPOILT])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_name_the_same_tensor(memory: MemoryDir, ranks: MakeRanks, world: int, spoilt: list[str]) -> None:
    """Only the ranks that store the bytes have seen them; when several have, the lowest rank's is named."""
    state = state_of(Plain())
    job: Ranks = ranks(state, world)
    job.store(1)
    with torch.no_grad():
        for name in spoilt:
            state.constant()[name].view(-1)[0] = float("inf")
    job.take(2)
    for member in job.members:
        member.finish()
    together = Together(world)
    said = together.do(lambda rank: settle(together.context(rank), job.members[rank], clean=False))
    assert {whole for whole, _ in said} == {None}
    (refused,) = {refused for _, refused in said}
    assert (refused.tensor, refused.version) == (spoilt[0], Version(1, 2))
    assert set(memory.whole()) == {Version(1, 1)}


class Cliff(nn.Module):
    """A weight in half precision that the update of step `at` takes beyond the largest number there is.

    Neither the loss nor the gradient norm tells of it: the weight has no part in the loss.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.edge = nn.Parameter(torch.full((3,), 60000.0, dtype=torch.float16))
        self.at = at
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        step = int(self.passes) // 2 + 1
        self.passes += 1
        pull = (self.edge - self.edge.detach()).nan_to_num(0.0).float().sum() * (-30000.0 if step == self.at else 0.0)
        return ((x * self.weight).sum(dim=1) - 1).square().mean() + pull


@dataclass
class Loop:
    """A worker's loop without its process."""

    memory: MemoryDir
    at: int
    policy: str

    def __post_init__(self) -> None:
        spec = job_spec(
            model={"type": "python", "entry": "tests.engine.test_refused:Cliff", "kwargs": {"at": self.at}},
            training={"optimizer": {"name": "sgd", "lr": 1.0}, "scheduler": {}},
            checkpoint={"non_finite": self.policy},
        )
        self.context = Context(0, 0, 1, CPU, StopFlag(), Heartbeat(self.memory, 0))
        self.parts = assemble(spec, self.context)
        self.progress = Progress()
        self.snapshots = Snapshots(
            self.parts.state, self.memory, run_id=RUN_ID, attempt=1, device=CPU,
            cadence=Cadence(1, 0, False), pace=Pace(256, 512, 128), restored=None, alive=self.context.beat,
        )  # fmt: skip

    def step(self) -> StepOutcome:
        outcome = train_step(self.parts, self.context, self.progress, self.snapshots)
        self.snapshots.begin(self.progress.step, self.progress.meta(self.parts, "spec"), drain_busy=False)
        return outcome


MakeLoop = Callable[[int, str], Loop]


@pytest.fixture
def loop(memory: MemoryDir, group: None) -> Iterator[MakeLoop]:
    made: list[Loop] = []

    def make(at: int, policy: str) -> Loop:
        made.append(Loop(memory, at, policy))
        return made[-1]

    yield make
    for one in made:
        one.snapshots.close()


def test_by_default_an_update_that_overflows_ends_the_run_at_the_next_step(memory: MemoryDir, loop: MakeLoop) -> None:
    one = loop(3, "stop")
    for _ in range(3):
        one.step()
    with pytest.raises(
        TrainingDiverged,
        match=r"^model\.edge holds NaN or infinity after the update of step 3; the state of step 2 was",
    ):
        one.step()
    assert one.progress.step == 3, "no further update"
    assert max(memory.whole()) == Version(1, 2)


def test_without_an_earlier_state_none_is_promised(memory: MemoryDir, loop: MakeLoop) -> None:
    one = loop(1, "stop")
    one.step()
    with pytest.raises(TrainingDiverged, match="no state of an earlier step was kept"):
        one.step()
    assert memory.whole() == {}


def test_told_to_train_on_the_last_good_state_stays_until_all_is_finite_again(
    memory: MemoryDir, loop: MakeLoop
) -> None:
    one = loop(3, "skip")
    outcomes = [one.step() for _ in range(6)]
    assert [outcome.refused and outcome.refused.version.step for outcome in outcomes] == [None, None, None, 3, 4, 5]
    assert [outcome.committed and outcome.committed.step for outcome in outcomes] == [None, 1, 2, None, None, None]
    assert [outcome.metrics["snapshot_bytes"] > 0 for outcome in outcomes] == [False, True, True, False, False, False]
    assert max(memory.whole()) == Version(1, 2)
    one.snapshots.finish()
    settle(one.context, one.snapshots, clean=False)
    with torch.no_grad():
        one.parts.model.edge.fill_(1.0)
    one.snapshots.take(6, {}, drain=False)
    one.snapshots.finish()
    assert settle(one.context, one.snapshots, clean=True) == (Version(1, 6), None)
    assert max(memory.whole()) == Version(1, 6)
