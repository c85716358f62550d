"""Steps of one worker in this process: what a restart must reproduce, and when training must stop."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.build import CPU, RUN_ID, Plain, content, gpt, in_memory, job_spec
from torch import Tensor, nn

from dtrain.engine.data.text import DataError
from dtrain.engine.entry import UserCodeError, UserCodeFailed
from dtrain.engine.optim.optimizers import learning_rate
from dtrain.engine.parallel.context import Context, StopFlag, pick_device
from dtrain.engine.restore.catalogue import whole_here
from dtrain.engine.restore.restore import NothingUsable, restore
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.snapshot.state import StateError, random_states, seed_everything
from dtrain.engine.training.parts import Parts, _check_same_data, assemble
from dtrain.engine.training.scaling import LossScale, scale_of
from dtrain.engine.training.step import Progress, TrainingDiverged, train_step
from dtrain.engine.worker import exit_code_of
from dtrain.specs.codes import Code
from dtrain.specs.load import spec_from_json
from dtrain.specs.models import Spec
from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.heartbeat import DONE_STEP, Heartbeat, read_heartbeats
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.reading.recovery import open_candidate, verify

pytestmark = pytest.mark.usefixtures("group")

Metrics = list[dict[str, Any]]


@pytest.fixture
def context(memory: MemoryDir) -> Context:
    return Context(0, 0, 1, CPU, StopFlag(), Heartbeat(memory, 0))


class Run:
    """A worker's loop without its process."""

    def __init__(self, spec: Spec, context: Context, memory: MemoryDir, attempt: int = 1) -> None:
        self.spec, self.context, self.memory, self.attempt = spec, context, memory, attempt
        self.parts = assemble(spec, context)
        self.progress = Progress(loss_scale=scale_of(spec.training.precision))
        self.restored: Version | None = None
        self.pace = Pace(256, 512, 128)
        self.metrics: Metrics = []

    def restore(self, step: int, attempt: int = 1) -> None:
        state = self.parts.state
        candidates = [in_memory(self.memory, step, attempt)]
        found = restore(state, whole_here(state), candidates, 0, self.context.all_agree)
        scale = scale_of(self.spec.training.precision, found.meta.get("loss_scale"))
        self.progress = Progress(step, found.meta["data"]["samples"], scale)
        self.restored = found.candidate.version

    def train(self, until: int) -> None:
        snapshots = Snapshots(
            self.parts.state, self.memory, run_id=RUN_ID, attempt=self.attempt, device=CPU,
            cadence=Cadence(1, 0, False), pace=self.pace, restored=self.restored, alive=self.context.beat,
        )  # fmt: skip
        try:
            while self.progress.step < until:
                self.context.step = self.progress.step + 1
                outcome = train_step(self.parts, self.context, self.progress, snapshots)
                self.metrics.append(outcome.metrics)
                snapshots.begin(self.progress.step, self.progress.meta(self.parts, "spec"), drain_busy=False)
            snapshots.finish()
        finally:
            snapshots.close()

    @property
    def losses(self) -> list[tuple[int, float, float, float]]:
        return [(m["step"], m["loss"], m["lr"], m["grad_norm"]) for m in self.metrics]


Begin = Callable[..., Run]


@pytest.fixture
def begin(context: Context, memory: MemoryDir) -> Begin:
    return lambda attempt=1, **changes: Run(job_spec(**changes), context, memory, attempt)


GPT = {
    "model": {**gpt(dropout=0.1).model_dump(), "vocab_size": 256},
    "dataset": {"type": "text", "path": __file__, "seq_len": 16},
    "training": {"max_grad_norm": 0.5},
}
JOBS = {
    "python": {},
    "gpt": GPT,
    "bf16": {**GPT, "training": {"precision": "bf16-mixed"}},
    "fp16": {**GPT, "training": {"precision": "fp16-mixed"}},
    "bf16 weights": {**GPT, "training": {"precision": "bf16", "max_grad_norm": 0.5, "ema_decay": 0.9}},
    "bf16 weights of one's own": {"training": {"precision": "bf16"}},
    "average": {"training": {"ema_decay": 0.9}},
    "momentum": {"training": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}},
    "one pass": {"training": {"micro_batch_size": 16}},
}


def test_row_96_whenever_signals_come_they_set_a_flag_and_nothing_else(begin: Begin, context: Context) -> None:
    calm = begin()
    calm.train(30)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    again = begin(2)

    def send() -> None:
        draw = random.Random(96)
        for _ in range(500):
            os.kill(os.getpid(), draw.choice(list(handlers)))
            time.sleep(draw.random() * 1e-3)

    sender = threading.Thread(target=send)
    context.stop.install()
    try:
        sender.start()
        again.train(30)
        sender.join()
        time.sleep(0.01)  # for the last one to be taken by this thread
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert context.stop.is_set
    assert again.losses == calm.losses
    assert content(again.parts.state) == content(calm.parts.state)


def test_row_57_an_update_that_would_not_be_finite_is_left_out_and_the_scale_is_kept(begin: Begin) -> None:
    """Row 57: the scale of a run that goes on is that of the run that never stopped."""
    whole = begin(**JOBS["fp16"])
    assert whole.progress.loss_scale is not None
    whole.progress.loss_scale.scale = 2.0**40
    before = content(whole.parts.state)
    whole.train(3)
    assert [m["skipped"] for m in whole.metrics] == [True] * 3
    assert [m["loss_scale"] for m in whole.metrics] == [2.0**40, 2.0**39, 2.0**38]
    assert all(m["grad_norm"] is None for m in whole.metrics)
    assert content(whole.parts.state) == before, "the steps count, their updates do not"
    again = begin(2, **JOBS["fp16"])
    again.restore(2)
    assert again.progress.loss_scale == LossScale(2.0**38, 0)
    again.train(30)
    assert again.metrics[0]["skipped"]
    assert not again.metrics[-1]["skipped"]
    assert again.metrics[-1]["loss_scale"] < 2.0**30


@pytest.mark.parametrize("bad", [2, 3])
def test_under_fp16_a_loss_that_is_no_number_is_left_out_until_the_third_in_a_row(begin: Begin, bad: int) -> None:
    job = troubled("nan", at_call=2 + 2 * 2 + 1, calls=2 * bad)
    run = begin(**job, training={"precision": "fp16-mixed"})
    if bad == 3:
        with pytest.raises(TrainingDiverged, match="the loss is nan at step 5"):
            run.train(8)
    else:
        run.train(8)
        assert [m["skipped"] for m in run.metrics] == [False] * 2 + [True] * 2 + [False] * 4
        assert [m["loss"] is None for m in run.metrics] == [m["skipped"] for m in run.metrics]
    assert {m["loss_scale"] for m in run.metrics} == {2.0**16}, "it is not the scale's fault"
    json.dumps(run.metrics, allow_nan=False)


@pytest.mark.parametrize("job", JOBS)
def test_a_run_continued_from_any_step_is_the_unbroken_one(begin: Begin, job: str) -> None:
    """Promise 4, in one process: losses, rates, norms and state bit for bit, with dropout and buffers."""
    whole = begin(**JOBS[job])
    whole.train(8)
    drawn = random_states(CPU)
    first = begin(**JOBS[job])
    first.train(3)
    for attempt, step in ((2, 3), (3, 4), (4, 5)):
        again = begin(attempt, **JOBS[job])
        again.restore(step, attempt - 1)
        again.train(8 if attempt == 4 else step + 1)
        assert again.losses == whole.losses[step : step + len(again.losses)]
    assert again.progress == whole.progress == Progress(8, 8 * 16, whole.progress.loss_scale)
    assert content(again.parts.state) == content(whole.parts.state)
    assert random_states(CPU) == drawn


def test_assembled_twice_it_is_the_same_and_the_warm_up_leaves_no_trace(begin: Begin) -> None:
    first = begin()
    generators = random_states(CPU)
    second = begin()
    assert content(first.parts.state) == content(second.parts.state)
    assert random_states(CPU) == generators
    fresh = Plain()
    assert torch.equal(first.parts.model.norm.running_mean, fresh.norm.running_mean)
    assert int(first.parts.model.norm.num_batches_tracked) == 0
    assert all(p.grad is None for p in first.parts.model.parameters())
    assert all(not tensor.any() for p in first.parts.optimizer.state.values() for tensor in p.values())


def test_only_what_the_passes_move_counts_as_moving(begin: Begin) -> None:
    """All else is copied behind the passes, divided among the ranks."""
    assert begin().parts.moving == frozenset()
    assert begin(**GPT).parts.moving == frozenset()
    assert begin(**troubled("teacher")).parts.moving == {"model.teacher"}


def test_a_run_begins_with_the_generators_of_its_seed_and_rank(begin: Begin) -> None:
    """Whatever building and warming up has drawn."""
    begin(seed=11)
    drawn = random_states(CPU)
    seed_everything(11, 0)
    assert random_states(CPU) == drawn


def test_another_seed_is_another_run(begin: Begin) -> None:
    assert begin(seed=7).parts.state.digest() != begin(seed=8).parts.state.digest()


def test_what_a_step_tells(begin: Begin) -> None:
    run = begin(training={"max_grad_norm": 1e-3})
    run.train(8)
    spec = run.spec
    assert [m["step"] for m in run.metrics] == list(range(1, 9))
    for m in run.metrics:
        assert m["lr"] == learning_rate(m["step"], 1e-2, spec.training.scheduler, 8)
        assert m["grad_norm"] > 1e-3, "the norm before it is clipped"
        assert 0 < m["forward_s"] + m["backward_s"] + m["optimizer_s"] <= m["step_s"]
        assert 0 <= m["stall_s"] < m["step_s"]
    assert run.metrics[0]["snapshot_bytes"] == 0
    assert len({m["snapshot_bytes"] for m in run.metrics[1:]}) == 1
    assert run.metrics[1]["snapshot_bytes"] > sum(map(len, content(run.parts.state).values()))


def test_the_loss_is_the_mean_over_all_passes(begin: Begin) -> None:
    model = {"type": "python", "entry": "tests.engine.test_step:Mean"}
    losses = [
        begin(model=model, training={"micro_batch_size": size, "optimizer": {"name": "sgd", "lr": 0.1}})
        for size in (16, 4)
    ]
    for run in losses:
        run.train(4)
    torch.testing.assert_close(losses[0].losses, losses[1].losses)


class Mean(nn.Module):
    """A model whose gradient can be checked by hand; it fails, moves or waits when a test says so."""

    def __init__(self, trouble: str = "", at_call: int = 0, calls: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.teacher = nn.Parameter(torch.full((4,), 1.0 if trouble == "copied teacher" else 2.0), requires_grad=False)
        self.trouble, self.calls = trouble, 0
        self.at_calls = range(at_call, at_call + calls)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if trouble == "expanded":
            self.register_buffer("scale", torch.ones(1).expand(4))
        if trouble == "grows":
            self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        loss = ((x * self.weight).sum(dim=1) - 1).square().mean()
        if self.trouble == "teacher":
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(self.weight, alpha=0.1)
        elif self.trouble == "copied teacher":
            self.teacher.data.lerp_(self.weight.detach(), 0.1)
        elif self.trouble == "grows":
            self.cache = torch.zeros(self.calls)
        elif self.calls in self.at_calls and self.trouble == "nan":
            return loss * float("nan")
        elif self.calls in self.at_calls and self.trouble == "gradient":
            return loss + (self.weight * 0).sqrt().sum()
        elif self.calls in self.at_calls and self.trouble == "raise":
            raise MemoryError("no room")
        return loss


def troubled(trouble: str, at_call: int = 0, calls: int = 1) -> dict[str, Any]:
    kwargs = {"trouble": trouble, "at_call": at_call, "calls": calls}
    return {"model": {"type": "python", "entry": "tests.engine.test_step:Mean", "kwargs": kwargs}}


@pytest.mark.parametrize(("trouble", "what"), [("nan", "the loss is nan"), ("gradient", "the gradient norm is nan")])
def test_what_is_no_number_never_reaches_the_weights(begin: Begin, memory: MemoryDir, trouble: str, what: str) -> None:
    """Row 75: the step before is kept, whole, and it is said what and where."""
    run = begin(**troubled(trouble, at_call=2 + 2 * 4 + 1))
    with pytest.raises(TrainingDiverged, match=rf"{what} at step 5; the state of step 4 was kept"):
        run.train(8)
    assert run.progress.step == 4
    assert all(torch.isfinite(tensor).all() for tensor in run.parts.state.constant().values())
    verify(open_candidate(in_memory(memory, 4)))
    assert max(memory.whole()) == Version(1, 4)
    expected = {name: data for name, data in content(run.parts.state).items() if name != "model.seen"}
    again = begin(2, **troubled(""))
    again.restore(4)
    assert {name: data for name, data in content(again.parts.state).items() if name != "model.seen"} == expected


def test_what_a_model_raises_in_a_pass_is_let_through(begin: Begin) -> None:
    run = begin(**troubled("raise", at_call=2 + 2 + 1))
    with pytest.raises((MemoryError, UserCodeFailed), match="no room"):
        run.train(8)
    assert run.progress.step == 1


@pytest.mark.parametrize("trouble", ["teacher", "copied teacher"])
def test_a_parameter_that_the_forward_pass_moves_is_stored_as_of_the_step(begin: Begin, trouble: str) -> None:
    """A teacher that follows its student is a parameter in name only; at first it is often a copy of it."""
    whole = begin(**troubled(trouble))
    initial = whole.parts.model.teacher.clone()
    assert torch.equal(initial, Mean(trouble).teacher), "the warm-up is undone"
    whole.train(8)
    assert not torch.equal(whole.parts.model.teacher, initial)
    late = begin(**troubled(trouble))
    late.pace = Pace(0, 0, 128)  # the copy begins when the passes are over
    late.train(6)
    again = begin(2, **troubled(trouble))
    again.restore(5)
    again.train(8)
    assert again.losses == whole.losses[5:]
    assert content(again.parts.state) == content(whole.parts.state)


def test_a_buffer_that_grows_is_refused_before_the_first_step(begin: Begin) -> None:
    with pytest.raises(StateError, match=r"model\.cache was torch.float32 \[1\] and is torch.float32 \[2\]"):
        begin(**troubled("grows"))


def test_row_66_a_buffer_whose_elements_share_memory(begin: Begin) -> None:
    """Row 66: trained and restored, or refused by name; not a crash in the middle."""
    try:
        run = begin(**troubled("expanded"))
    except StateError as error:
        assert "model.scale" in str(error)
        return
    run.train(2)
    again = begin(2, **troubled("expanded"))
    again.restore(2)
    assert content(again.parts.state) == content(run.parts.state)


def test_a_step_raises_the_counter_at_every_window(begin: Begin, memory: MemoryDir) -> None:
    run = begin()
    (before,) = read_heartbeats(memory)
    assert before.step == 0
    assert before.count > 0, "the warm-up is progress too"
    run.train(1)
    (after,) = read_heartbeats(memory)
    assert after.step == 1
    assert after.count - before.count == 2 * 2 + 1, "two windows per pass, and one after them"
    run.context.sign_off()
    assert read_heartbeats(memory)[0].step == DONE_STEP


def test_a_stop_signal_is_acted_on_at_the_end_of_the_step(begin: Begin) -> None:
    """Row 96: the handler sets a flag only."""
    run = begin()
    flag, numbers = run.context.stop, (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        flag.install()
        for number in numbers:
            flag.is_set = False
            os.kill(os.getpid(), number)
            assert flag.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    outcome = train_step(run.parts, run.context, run.progress, None)
    assert outcome.stop
    assert run.progress.step == 1, "the step itself was finished"
    flag.is_set = False
    assert not train_step(run.parts, run.context, run.progress, None).stop


def test_row_87_a_child_of_a_worker_only_sets_a_flag_of_its_own(begin: Begin, memory: MemoryDir) -> None:
    """Loaders of people's own fork: told to stop with the whole group, a child neither saves nor ends the rank."""
    run = begin()
    flag = run.context.stop
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    try:
        flag.install()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7 if flag.is_set else 1)
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert os.waitstatus_to_exitcode(status) == 7, "it went on, and left with a code of its own"
    assert not flag.is_set
    assert memory.whole() == {}


def test_data_smaller_than_a_batch_are_refused_when_the_parts_are_put_together(begin: Begin) -> None:
    dataset = {"type": "python", "entry": "tests.engine.build:points", "kwargs": {"samples": 15}}
    with pytest.raises(DataError, match="15 samples"):
        begin(dataset=dataset)


@dataclass
class Ring:
    """Ranks whose numbers are summed one after the other; the last one may see other data."""

    world: int
    others: str | None = None

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        sums = values
        for rank in range(1, self.world):
            theirs = values
            if self.others is not None and rank == self.world - 1:
                beside = Ring(1)
                _check_same_data(SimpleNamespace(fingerprint=self.others), beside)  # type: ignore[arg-type]
                theirs = beside.said
            sums = [a + b for a, b in zip(sums, theirs, strict=True)]
        self.said = values
        return sums


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 7, 8, 16, 64, 1000])
def test_ranks_with_the_same_data_agree_whatever_their_number(world: int) -> None:
    """Sums of many equal numbers are rounded; that must not look like a difference."""
    for number in range(100):
        _check_same_data(SimpleNamespace(fingerprint=digest(b"%d" % number)), Ring(world))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_one_rank_with_other_data_is_seen(world: int) -> None:
    for number in range(20):
        ring = Ring(world, digest(b"%d" % -number))
        with pytest.raises(DataError, match="do not see the same data"):
            _check_same_data(SimpleNamespace(fingerprint=digest(b"%d" % (number + 1))), ring)  # type: ignore[arg-type]


def test_tokens_of_a_step_are_counted_for_text_alone(begin: Begin) -> None:
    assert begin().parts.tokens_per_step is None
    assert begin(**GPT).parts.tokens_per_step == 16 * 16


def test_the_device_that_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, picked in ((False, "cpu"), (True, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert str(pick_device("auto", 1)) == picked
        assert str(pick_device("cpu", 1)) == "cpu"
        assert str(pick_device("cuda", 1)) == "cuda:1"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NothingUsable("x"), Code.DAMAGED),
        (StateError("x"), Code.BAD_SPEC),
        (DataError("x"), Code.BAD_SPEC),
        (UserCodeError("x"), Code.BAD_SPEC),
        (TrainingDiverged("x"), Code.FAILED),
        (OSError(errno.ENOSPC, "no room", "/a/cache/of/a/person's/own"), Code.MISSING_RESOURCE),
        (OSError(errno.EACCES, "denied", "x"), Code.FAILED),
        (MemoryError("x"), Code.FAILED),
        (RuntimeError("x"), Code.FAILED),
    ],
)
def test_exit_codes_of_workers(error: Exception, code: Code) -> None:
    assert exit_code_of(error) == code


def test_parts_name_what_is_stored(begin: Begin) -> None:
    parts: Parts = begin().parts
    meta = Progress(3, 48).meta(parts, "digest")
    assert meta["data"]["samples"] == 48
    assert meta["data"]["fingerprint"] == parts.fingerprint
    assert meta["ties"] == parts.state.ties()
    assert (meta["spec_digest"], meta["scheduler"]) == ("digest", {"name": "cosine", "step": 3})


def test_a_checkpoint_holds_the_spec_that_made_it(begin: Begin, memory: MemoryDir) -> None:
    run = begin()
    run.train(2)
    for step in (1, 2):
        meta = open_candidate(in_memory(memory, step)).meta
        assert spec_from_json(meta["spec"]) == run.spec
        assert (meta["data"]["samples"], meta["scheduler"]["step"]) == (step * 16, step)
