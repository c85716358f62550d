"""Snapshots of a state on a device, whole steps of it: what is committed when, and of which step it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from tests.engine.build import CPU, RUN_ID, content, in_memory, job_spec
from tests.engine.conftest import MakeRanks
from tests.engine.device import Bench, Turned, TurnedMark, needs_cuda
from tests.engine.test_snapshot import state_part, stored
from torch import Tensor, nn

from dtrain.engine.optim.optimizers import build_optimizer
from dtrain.engine.parallel.context import Context, StopFlag
from dtrain.engine.snapshot import packs
from dtrain.engine.snapshot.buckets import BUCKETS, update_in_parts
from dtrain.engine.snapshot.device import Mark
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.snapshot.state import StateError, TrainState, tensor_bytes
from dtrain.engine.training.parts import assemble
from dtrain.engine.training.step import Progress, TrainingDiverged, settle, train_step
from dtrain.specs.models import AdamW, Sgd
from dtrain.tiers import faults
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.heartbeat import Heartbeat
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.reading.recovery import open_candidate, verify


class Whole(nn.Module):
    """Whole numbers, so that what a device adds to them is exact: large, small and turned ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randint(99, (70, 80)).float())
        self.turned = nn.Parameter(torch.randint(99, (6, 5)).float().t())
        self.small = nn.ParameterList(torch.randint(99, (n,)).float() for n in range(1, 9))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("none", torch.zeros(0))


class Adding(torch.optim.Optimizer):
    """Adds one to each weight and to what it keeps of it, when the device has come to that."""

    def __init__(self, model: nn.Module, bench: Bench) -> None:
        names = dict(model.named_parameters())
        groups = [[p for name, p in names.items() if ("small" in name) == small] for small in (False, True)]
        super().__init__([{"params": group} for group in groups], {})
        self.bench, self.calls = bench, 0
        for parameter in names.values():
            self.state[parameter] = {"kept": torch.zeros_like(parameter)}

    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter, self.state[parameter]["kept"]):
                    self.bench.add(tensor, 1)


class Job:
    """A state that lies on a device, and what it holds at each boundary, known without asking that."""

    def __init__(self, bench: Bench, ranks: MakeRanks) -> None:
        self.bench = bench
        model = Whole()
        self.state = TrainState(model, Adding(model, bench))
        self.first = {name: tensor.detach().clone() for name, tensor in self.state.constant().items()}
        pace = Pace(forward_bytes=3000, backward_bytes=5000, slice_bytes=1024)
        self.ranks = ranks(self.state, side=bench.side, pace=pace)
        self.updates = self.passes = 0

    def expected(self) -> dict[str, bytes]:
        found = {name: bytes(tensor_bytes(tensor + self.updates)) for name, tensor in self.first.items()}
        seen = torch.full((3,), float(self.passes))
        return found | {"model.seen": bytes(tensor_bytes(seen)), "model.none": b""}

    def step(self, step: int) -> dict[str, bytes]:
        """All of a step but its end on the host, which runs ahead of the device; returns what must be stored."""
        self.state.optimizer.step()
        self.updates += 1
        expected = self.expected()
        self.ranks.take(step)
        (member,) = self.ranks.members
        for _ in range(2):
            member.forward_window()
            self.bench.add(self.state.model.seen, 1)
            self.passes += 1
            member.backward_window()
        member.update(self.state.optimizer)
        self.updates += 1
        return expected


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are gathered by the training thread, but only where that can read them."""
    monkeypatch.setattr(packs, "TINY_BYTES", 0)


def test_every_snapshot_is_of_its_boundary_however_far_the_host_is_ahead(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Weights, moments and buffers of one update, none of the next one, which is made in parts."""
    for seed in range(8):
        bench = Bench(Turned(seed))
        job = Job(bench, ranks)
        for step in range(1, 7):
            expected = job.step(step)
            assert job.state.optimizer.calls > 2 * step
            bench.run(job.ranks.finish)
            assert state_part(stored(memory, step)) == expected
            verify(open_candidate(in_memory(memory, step)))
        bench.run(job.ranks.close)
        assert bench.side.locked == {}, "the slots' pages are let go"


def test_a_snapshot_is_whole_when_its_last_slice_has_arrived_not_when_the_update_is_handed_over(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    bench = Bench(Turned())
    job = Job(bench, ranks)
    job.step(1)
    assert bench.side.bytes_copied == 0
    assert memory.whole() == {}
    bench.run(job.ranks.finish)
    job.step(2)
    assert set(memory.whole()) == {Version(1, 1)}
    bench.run(job.ranks.finish)
    assert max(memory.whole()) == Version(1, 2)
    bench.run(job.ranks.close)


def test_what_a_pass_writes_is_refused_before_the_update_and_never_committed(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    bench = Bench(Turned())
    job = Job(bench, ranks)
    (member,) = job.ranks.members
    job.state.optimizer.step()
    member.take(1, {}, drain=False)
    member.forward_window()
    with torch.no_grad():
        job.state.model.large.mul_(1)
    with pytest.raises(StateError, match=r"^model\.large was changed during a forward or backward pass"):
        member.update(job.state.optimizer)
    bench.run(member.salvage)
    assert memory.whole() == {}
    bench.run(job.ranks.close)


class Lazy(Turned):
    """Computes at once, and copies as late as it may: when it is made to wait for that, or has nothing else to do."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = threading.Event()
        self.ended = False
        self.thread = threading.Thread(target=self._go_on)
        self.thread.start()

    def computed(self) -> TurnedMark:
        mark = TurnedMark()
        mark.passed.set()
        return mark

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, TurnedMark)
        while not mark.passed.is_set():
            assert self.turn("side")

    def _go_on(self) -> None:
        while not self.ended:
            self.idle.wait()
            if not self.turn("side"):
                threading.Event().wait(0.0005)

    def end(self) -> None:
        self.ended = True
        self.idle.set()
        self.thread.join()


@dataclass
class Loop:
    """A worker's loop without its process, over host memory that passes for a device's, or without that."""

    memory: MemoryDir
    side: Lazy | None
    changes: dict[str, object]
    losses: list[object] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = job_spec(**self.changes)
        self.context = Context(0, 0, 1, CPU, StopFlag(), Heartbeat(self.memory, 0))
        self.parts = assemble(spec, self.context)
        self.progress = Progress()
        self.snapshots = Snapshots(
            self.parts.state, self.memory, run_id=RUN_ID, attempt=1, device=CPU, cadence=Cadence(1, 0, False),
            pace=Pace(256, 512, 128), restored=None, alive=self.context.beat, side=self.side,
        )  # fmt: skip
        self.boundaries: dict[int, dict[str, bytes]] = {}
        self.committed: list[int] = []
        self.refused: list[int] = []

    def point(self, name: str, step: int | None = None) -> None:
        """Where the engine passes a fault point; the device gets time of its own after the update."""
        if name in ("update.before", "update.after", "copy.committed", "copy.begin"):
            self.passed.append(f"{name} {step}")
        if self.side is not None and name == "update.after":
            self.side.idle.set()
        if self.side is not None and name == "copy.begin":
            self.side.idle.clear()

    def step(self) -> None:
        outcome = train_step(self.parts, self.context, self.progress, self.snapshots)
        self.losses.append((outcome.metrics["loss"], outcome.metrics["grad_norm"]))
        self.committed += [outcome.committed.step] if outcome.committed is not None else []
        self.refused += [outcome.refused.version.step] if outcome.refused is not None else []
        self.boundaries[self.progress.step] = content(self.parts.state)
        self.snapshots.begin(self.progress.step, self.progress.meta(self.parts, "spec"), drain_busy=False)


class MakeLoop:
    """Makes loops over this test's memory, and ends them."""

    def __init__(self, memory: MemoryDir, patch: pytest.MonkeyPatch) -> None:
        self.memory, self.patch, self.made = memory, patch, list[Loop]()

    def __call__(self, *, lazy: bool, **changes: object) -> Loop:
        one = Loop(self.memory, Lazy() if lazy else None, changes)
        self.patch.setattr(faults, "point", one.point)
        self.made.append(one)
        return one


@pytest.fixture
def loop(memory: MemoryDir, group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLoop]:
    made = MakeLoop(memory, monkeypatch)
    yield made
    for one in made.made:
        if one.side is not None:
            one.side.idle.set()
        one.snapshots.close()
        if one.side is not None:
            one.side.end()


@pytest.mark.parametrize("training", [{}, {"ema_decay": 0.9}, {"precision": "bf16"}], ids=["plain", "ema", "bf16"])
def test_steps_are_the_same_with_a_device_that_copies_as_late_as_it_may(
    memory: MemoryDir, loop: MakeLoop, training: dict[str, object]
) -> None:
    plain = loop(lazy=False, training=training)
    for _ in range(6):
        plain.step()
    one = loop(lazy=True, training=training)
    for step in range(1, 7):
        one.step()
        if step > 1:
            assert state_part(stored(memory, step - 1)) == one.boundaries[step - 1]
    assert one.losses == plain.losses
    assert one.committed == plain.committed == [1, 2, 3, 4, 5]
    assert content(one.parts.state) == content(plain.parts.state)
    assert one.side is not None
    one.side.idle.set()
    one.snapshots.finish()
    assert settle(one.context, one.snapshots, clean=True) == (Version(1, 6), None)
    assert state_part(stored(memory, 6)) == one.boundaries[6]


def test_the_update_is_handed_over_before_the_snapshot_is_committed(loop: MakeLoop) -> None:
    """And on the host after it: the thread that trains waits there."""
    orders = {}
    for lazy in (False, True):
        one = loop(lazy=lazy)
        one.step()
        one.passed.clear()
        one.step()
        orders[lazy] = one.passed
    assert orders[False] == ["copy.committed 1", "update.before 2", "update.after 2", "copy.begin 2"]
    assert orders[True] == ["update.before 2", "update.after 2", "copy.committed 1", "copy.begin 2"]


def test_without_the_hold_the_snapshot_would_be_a_mix(
    memory: MemoryDir, loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter-test: this device would show it."""
    one = loop(lazy=True)
    one.step()
    monkeypatch.setattr(Lazy, "hold", lambda self, mark: None)
    one.step()
    assert state_part(stored(memory, 1)) != one.boundaries[1]


CLIFF = {
    "model": {"type": "python", "entry": "tests.engine.test_refused:Cliff", "kwargs": {"at": 3}},
    "training": {"optimizer": {"name": "sgd", "lr": 1.0}, "scheduler": {}},
}


def test_a_state_that_is_not_finite_is_refused_after_the_update_that_follows_it(
    memory: MemoryDir, loop: MakeLoop
) -> None:
    one = loop(lazy=True, **CLIFF, checkpoint={"non_finite": "skip"})
    for _ in range(6):
        one.step()
    assert one.refused == [3, 4, 5]
    assert one.committed == [1, 2]
    assert max(memory.whole()) == Version(1, 2)


def test_by_default_it_ends_the_run(memory: MemoryDir, loop: MakeLoop) -> None:
    one = loop(lazy=True, **CLIFF)
    for _ in range(3):
        one.step()
    with pytest.raises(TrainingDiverged, match=r"edge holds NaN .* step 3; the state of step 2 was kept"):
        one.step()
    assert one.progress.step == 3
    assert max(memory.whole()) == Version(1, 2)


@pytest.mark.parametrize("kind", [AdamW(name="adamw", lr=1e-2), Sgd(name="sgd", lr=0.1, momentum=0.9)])
def test_an_update_in_parts_is_the_update_bit_for_bit(kind: AdamW | Sgd) -> None:
    """And no part comes before what it waits for; of some parameters another rank has the copies."""
    states = []
    for in_parts in (False, True):
        torch.manual_seed(2)
        model = nn.ParameterList(torch.randn(n, n % 4 + 1) if n % 2 else torch.randn(9 * n) for n in range(12))
        optimizer = build_optimizer(model, kind)
        last = {parameter: 20 - number for number, parameter in enumerate(model) if number % 3}
        held: list[int] = []

        def look(
            optimizer: torch.optim.Optimizer,
            *_: object,
            last: dict[Tensor, int] = last,
            held: list[int] = held,
        ) -> None:
            due = [last.get(parameter, -1) for group in optimizer.param_groups for parameter in group["params"]]
            assert max(due) <= max(held, default=-1)

        for _ in range(3):
            held.clear()
            for parameter in model:
                parameter.grad = torch.randn_like(parameter)
            if in_parts:
                handle = optimizer.register_step_pre_hook(look)
                update_in_parts(optimizer, last, held.append)
                handle.remove()
                assert held == sorted(held)
                assert 3 <= len(held) <= BUCKETS
            else:
                optimizer.step()
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 12
        states.append(content(TrainState(model, optimizer)))
    assert states[0] == states[1]


@needs_cuda
def test_on_a_real_device_every_snapshot_is_of_its_boundary(memory: MemoryDir) -> None:
    """The state at the boundary is cloned on the device, in the order of its work; the host waits for nothing."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).to(device)
    state = TrainState(model, build_optimizer(model, AdamW(name="adamw", lr=1e-2)))
    snapshots = Snapshots(
        state, memory, run_id=RUN_ID, attempt=1, device=device, cadence=Cadence(1, 0, False),
        pace=Pace(2**20, 2**21, 2**18), restored=None, alive=lambda: None,
    )  # fmt: skip
    try:
        for step in range(1, 21):
            boundary: dict[str, Tensor] = {
                name: tensor.clone() for name, tensor in (state.constant() | state.changing()).items()
            }
            snapshots.take(step, {}, drain=False)
            for _ in range(2):
                snapshots.forward_window()
                loss = model(torch.randn(512, 512, device=device)).square().mean()
                snapshots.backward_window()
                loss.backward()
            snapshots.update(state.optimizer)
            state.optimizer.zero_grad(set_to_none=True)
            snapshots.finish()
            snapshots.superseded()
            expected = {name: bytes(tensor_bytes(tensor)) for name, tensor in boundary.items()}
            assert state_part(stored(memory, step)) == expected
    finally:
        snapshots.close()
