"""Evaluation: data that is never trained on, and training that goes on as if it had not been."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.build import CPU, Odd, Plain, content, gpt, job_spec, state_of
from tests.engine.conftest import MakeRanks
from torch import Tensor, nn

from dtrain.engine.data.build import HeldOut, build_data
from dtrain.engine.data.text import DataError, TextData
from dtrain.engine.parallel.context import Context, StopFlag
from dtrain.engine.snapshot.snapshots import Cadence, Pace
from dtrain.engine.snapshot.state import random_states, tensor_bytes
from dtrain.engine.training.evaluation import Evaluated, evaluate
from dtrain.engine.training.parts import assemble
from dtrain.engine.training.report import Reporter
from dtrain.engine.training.step import Progress, train_step
from dtrain.planners.sharding.mesh import Mesh
from dtrain.specs.models import Spec
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.heartbeat import Heartbeat, read_heartbeats
from dtrain.tiers.memory.slots import MemoryDir

OWN = {
    "every": 2,
    "batches": 3,
    "dataset": {"type": "python", "entry": "tests.engine.build:points", "kwargs": {"samples": 24}},
}
JOBS: dict[str, dict[str, Any]] = {
    "python, dropout and batch norm": {"evaluation": OWN},
    "gpt over text": {
        "model": {**gpt(dropout=0.1).model_dump(), "vocab_size": 256},
        "dataset": {"type": "text", "path": __file__, "seq_len": 16},
        "evaluation": {"every": 2, "batches": 3, "fraction": 0.1},
    },
    "bf16": {"training": {"precision": "bf16-mixed"}, "evaluation": OWN},
    "a model that draws and counts in every mode": {
        "model": {"type": "python", "entry": "tests.engine.test_evaluation:Restless"},
        "evaluation": OWN,
    },
}


class Restless(Plain):
    """Draws noise and counts its passes in evaluation mode, too; a part of it is never in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))
        self.kept = nn.Dropout(0.5)
        self.kept.training = False

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(self.kept(x) + 0.1 * torch.randn_like(x))


@pytest.fixture
def context(memory: MemoryDir) -> Context:
    return Context(0, 0, 1, CPU, StopFlag(), Heartbeat(memory, 0))


def training(spec: Spec, context: Context, ranks: MakeRanks, *, evaluating: bool) -> tuple[list[Any], list[Evaluated]]:
    """Eight steps with snapshots; metrics without times, and state and generators at the end."""
    parts = assemble(spec, context)
    (snapshots,) = ranks(parts.state, pace=Pace(64, 128, 32), cadence=Cadence(1, 0, False)).members
    progress, told, evaluated = Progress(), [], []
    while progress.step < 8:
        context.step = progress.step + 1
        outcome = train_step(parts, context, progress, snapshots)
        told.append([outcome.metrics[key] for key in ("step", "loss", "lr", "grad_norm", "snapshot_bytes")])
        snapshots.begin(progress.step, progress.meta(parts, "spec"), drain_busy=False)
        if evaluating and spec.evaluates(progress.step):
            result, stop = evaluate(parts, context, snapshots)
            assert result is not None and not stop
            evaluated.append(result)
    snapshots.finish()
    snapshots.superseded()
    modes = [module.training for module in parts.model.modules()]
    return [told, content(parts.state), random_states(CPU), modes], evaluated


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("job", JOBS)
def test_training_is_the_same_with_and_without_bit_for_bit(job: str, context: Context, ranks: MakeRanks) -> None:
    spec = job_spec(**JOBS[job])
    plain, _ = training(spec, context, ranks, evaluating=False)
    busy, evaluated = training(spec, context, ranks, evaluating=True)
    assert busy == plain
    assert [result.step for result in evaluated] == [2, 4, 6, 8]
    losses = [result.loss for result in evaluated]
    assert len(set(losses)) == 4 and all(loss is not None for loss in losses)
    assert [result.loss for result in training(spec, context, ranks, evaluating=True)[1]] == losses


@pytest.mark.usefixtures("group")
def test_the_copy_goes_on_in_an_evaluation(context: Context, ranks: MakeRanks, memory: MemoryDir) -> None:
    parts = assemble(job_spec(**JOBS["python, dropout and batch norm"]), context)
    (snapshots,) = ranks(parts.state, pace=Pace(2**20, 0, 2**16)).members
    context.step = 1
    snapshots.begin(1, {}, drain_busy=False)
    evaluate(parts, context, snapshots)
    for _ in range(10_000):
        if snapshots.copier.busy:
            time.sleep(0.001)
    assert {version.step for version in memory.whole()} == {1}


class Alone:
    """A rank of several: what it would add to the sum over them is kept."""

    def __init__(self, context: Context, rank: int, world: int) -> None:
        self.context = replace(context, rank=rank, world=world, mesh=Mesh(dp_replicate=world))
        self.said: list[float] = []
        self.context.sum_over_ranks = self._keep  # type: ignore[method-assign]

    def _keep(self, values: list[float]) -> list[float]:
        self.said = values
        return values


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("job", JOBS)
def test_the_result_does_not_depend_on_the_world_size(
    job: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: None)
    spec = job_spec(**JOBS[job])
    parts = assemble(spec, context)
    whole, _ = evaluate(parts, context, None)
    for world in (2, 3, 5):
        members = [Alone(context, rank, world) for rank in range(world)]
        for member in members:
            evaluate(parts, member.context, None)
        *losses, left, stops = [sum(column) for column in zip(*(member.said for member in members), strict=True)]
        assert whole is not None and sum(losses) / len(losses) == whole.loss
        assert (left, stops) == (0, 0)


@pytest.mark.usefixtures("group")
def test_buffers_of_every_form_are_taken_from_rank_0_whole(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 sends stands for other bytes than this rank has: every tensor gets exactly those."""
    state = state_of(Odd())
    sent: list[Tensor] = []

    def broadcast(tensor: Tensor, source: int, group: object) -> None:
        dist.all_reduce(tensor)  # the group takes it: one row of bytes
        tensor.copy_(torch.zeros_like(tensor))
        sent.append(tensor)

    with monkeypatch.context() as patch:
        patch.setattr("dtrain.engine.parallel.context.dist.broadcast", broadcast)
        context.share(state.changing().values())
    assert len(sent) == sum(tensor.numel() > 0 for tensor in state.changing().values()) >= 5
    assert not any(any(tensor_bytes(tensor)) for tensor in state.changing().values())


@pytest.mark.usefixtures("group")
def test_told_to_stop_it_ends_after_the_batch_and_says_nothing(context: Context, memory: MemoryDir) -> None:
    parts = assemble(job_spec(**JOBS["python, dropout and batch norm"]), context)
    seen = []

    def stopped(*_: object) -> None:
        seen.append(context.stop.is_set)
        context.stop.is_set = True

    parts.model.register_forward_pre_hook(stopped)
    before = read_heartbeats(memory)[0].count
    assert evaluate(parts, context, None) == (None, True)
    assert seen == [False], "one batch of three"
    assert read_heartbeats(memory)[0].count == before + 2
    assert parts.model.training


@pytest.mark.usefixtures("group")
def test_told_to_stop_in_the_last_batch_it_gives_its_result(context: Context) -> None:
    parts = assemble(job_spec(**JOBS["gpt over text"]), context)
    expected, _ = evaluate(parts, context, None)
    calls = []

    def stopped(*_: object) -> None:
        calls.append(any(module.training for module in parts.model.modules()))
        context.stop.is_set = len(calls) == 3

    parts.model.register_forward_pre_hook(stopped)
    result, stop = evaluate(parts, context, None)
    assert calls == [False] * 3, "dropout is off"
    assert stop and result is not None and expected is not None
    assert result.loss == expected.loss
    assert result.perplexity == pytest.approx(torch.tensor(result.loss).double().exp().item())


@pytest.mark.usefixtures("group")
def test_a_loss_that_is_no_number_is_told_as_none(context: Context) -> None:
    parts = assemble(job_spec(**JOBS["gpt over text"]), context)
    with torch.no_grad():
        next(parts.model.parameters()).fill_(float("nan"))
    result, _ = evaluate(parts, context, None)
    assert result is not None and (result.loss, result.perplexity) == (None, None)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.999])
def test_no_token_is_both_trained_on_and_held_out(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 4)
    whole = TextData(str(path), 5)
    trained, held_out = whole.split(fraction)
    assert trained.tokens + held_out.tokens == whole.tokens
    tokens = [
        {part.first + index * 5 + offset for index in range(len(part)) for offset in range(6)}
        for part in (trained, held_out)
    ]
    assert not tokens[0] & tokens[1]
    for part in (trained, held_out):
        for index in range(len(part)):
            first = part.first + index * 5
            assert part[index].tolist() == [number % 256 for number in range(first, first + 6)]
    assert trained.fingerprint() == whole.fingerprint()


def test_without_the_block_all_of_the_text_is_trained_on() -> None:
    changes = {key: value for key, value in JOBS["gpt over text"].items() if key != "evaluation"}
    samples, others = build_data(job_spec(**changes))
    assert others is None
    assert len(samples) == len(TextData(__file__, 16))


def test_too_little_to_evaluate_on_is_refused_with_what_would_do(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 20_000)
    text = {"type": "text", "path": str(path), "seq_len": 16}
    spec = job_spec(dataset=text, evaluation={"every": 2, "fraction": 0.02})
    _, others = build_data(spec)
    assert spec.evaluation is not None and others is not None
    with pytest.raises(DataError, match=r"24 samples .* 20 \* 8 = 160; use evaluation.batches=3 or hold out more"):
        HeldOut(others, spec.evaluation, seed=7, micro_batch=8)


def test_a_file_below_the_training_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_bytes(b"x" * 2000)
    (tmp_path / "more.txt").write_bytes(b"y" * 2000)
    text = {"type": "text", "path": str(tmp_path), "seq_len": 16}
    own = {**text, "path": str(tmp_path / "held_out.txt")}
    with pytest.raises(DataError, match=r"held_out\.txt is trained on, too"):
        build_data(job_spec(dataset=text, evaluation={"every": 2, "dataset": own}))
    own = {**text, "path": str(tmp_path / "nothing")}
    with pytest.raises(DataError, match=r"evaluation\.dataset\.path .*no such file or folder"):
        build_data(job_spec(dataset=text, evaluation={"every": 2, "dataset": own}))


def test_the_line_of_the_step_is_told_again_with_what_the_evaluation_gave(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    result = Evaluated(step=4, loss=1.5, perplexity=4.5, batches=3, samples=24, seconds=0.25)
    first = Reporter(run, 1, active=True)
    first.step({"step": 4, "loss": 2.0, "step_s": 0.5}, 10, 64, None)
    assert not first.has_evaluated(4)
    again = Reporter(run, 2, active=True)
    again.evaluated(result)
    before, after = read_lines(run.metrics)
    given = {"eval_loss": 1.5, "eval_perplexity": 4.5, "eval_s": 0.25, "attempt": 2, "time": after["time"]}
    assert after == before | given, "an attempt that was cut off had written the line"
    (event,) = read_lines(run.events)
    assert (event["event"], event["step"], event["loss"], event["attempt"]) == ("evaluated", 4, 1.5, 2)
    assert again.has_evaluated(4) and not again.has_evaluated(5)
    assert Reporter(run, 2, active=False).has_evaluated(5), "the other ranks leave it to rank 0"
