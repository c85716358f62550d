"""People's own models and data: the same promises, and one clear line when their code fails."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, cleaned

from dtrain.tiers.faults import fail_at

ZOO = '''
import os, random, subprocess, sys, time
import numpy, torch
from torch import nn
from torch.nn import functional as F

class Mlp(nn.Module):
    """BatchNorm, dropout, a tied pair, a frozen layer, a parameter without gradient, draws from three generators."""
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.second, self.tied = nn.Linear(width, width), nn.Linear(width, width)
        self.tied.weight = self.second.weight
        self.frozen, self.unused = nn.Linear(width, width), nn.Parameter(torch.ones(3))
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(width, 4)
        self.transposed = nn.Parameter(torch.randn(width, 5).t())
    def forward(self, x, y):
        x = F.dropout(F.relu(self.norm(self.first(x))), 0.2, self.training)
        x = self.frozen(self.tied(F.relu(self.second(x)))) + random.random() * 0.1 + numpy.random.rand() * 0.1
        return F.cross_entropy(self.out(x), y) + self.transposed.square().mean()

def mlp(width=24):
    return Mlp(width)

class Points:
    def __len__(self):
        return 512
    def __getitem__(self, i):
        x = torch.sin(torch.arange(8.0) * (i + 1))
        return x, int(i) % 4

points = Points

def broken(width):
    raise ValueError("the layers do not fit")

class Late(Mlp):
    calls = 0
    def forward(self, x, y):
        Late.calls += 1
        if Late.calls > (14 if os.environ["DTRAIN_ATTEMPT"] == "1" else 2):
            raise MemoryError("no room for the activations")
        return super().forward(x, y)

def late(width=24):
    return Late(width)

class Failing(Mlp):
    """Goes wrong on rank 1 in the middle of the first attempt."""
    calls = 0
    def due(self):
        if os.environ.get("RANK") != "1" or os.environ["DTRAIN_ATTEMPT"] != "1":
            return False
        Failing.calls += 1
        return Failing.calls == 14

class HoldsGil(Failing):
    def forward(self, x, y):
        if self.due():
            import ctypes
            ctypes.PyDLL(None).sleep(600)
        return super().forward(x, y)

class Tidying(Failing):
    """Out of memory in a backward pass, and the way out calls a collective that the others never will."""
    def forward(self, x, y):
        loss = super().forward(x, y)
        if self.training and loss.requires_grad and self.due():
            loss.register_hook(self.fail)
        return loss
    def fail(self, gradient):
        try:
            raise MemoryError("no room for the gradients")
        finally:
            torch.distributed.barrier()

def holds_gil(width=24):
    return HoldsGil(width)

def tidying(width=24):
    return Tidying(width)

def napping(width=24):
    if os.environ.get("RANK") == "1" and os.environ.get("DTRAIN_ATTEMPT") == "1":
        time.sleep(600)
    return Mlp(width)

class Dozing(Points):
    taken = 0
    def __getitem__(self, i):
        if os.environ.get("RANK") == "1" and os.environ.get("DTRAIN_ATTEMPT") == "1":
            Dozing.taken += 1
            if Dozing.taken == 60:
                time.sleep(600)
        return super().__getitem__(i)

dozing = Dozing

class Diverging(Mlp):
    def forward(self, x, y):
        Diverging.calls = getattr(Diverging, "calls", 0) + 1
        return super().forward(x, y) * (float("nan") if Diverging.calls > 16 else 1.0)

def diverging(width=24):
    return Diverging(width)

class Parent(Mlp):
    def __init__(self, width):
        super().__init__(width)
        if "dtrain.engine.worker" in " ".join(sys.orig_argv):
            subprocess.Popen(["sleep", "600"])

def parent(width=24):
    return Parent(width)

class Teacher(Mlp):
    """A teacher that follows the student in every forward pass: half of it in place, half behind autograd's back."""
    def __init__(self, width):
        super().__init__(width)
        self.teacher = nn.Linear(8, width)
        self.teacher.requires_grad_(False)
    def forward(self, x, y):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
            self.teacher.bias.data.mul_(0.9).add_(self.first.bias.data, alpha=0.1)
        return super().forward(x, y) + (self.first(x) - self.teacher(x)).square().mean()

def teacher(width=24):
    return Teacher(width)

class Growing(Mlp):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("history", torch.zeros(1))
    def forward(self, x, y):
        loss = super().forward(x, y)
        self.history = torch.cat([self.history, loss.detach().reshape(1)])
        return loss

def growing(width=24):
    return Growing(width)

class Tampering(Mlp):
    """Writes into a trained weight in a forward pass, but not in the first ones."""
    calls = 0
    def forward(self, x, y):
        Tampering.calls += 1
        if Tampering.calls > 9:
            with torch.no_grad():
                self.first.weight.clamp_(-0.01, 0.01)
        return super().forward(x, y)

def tampering(width=24):
    return Tampering(width)

class Logits(Mlp):
    def forward(self, x, y):
        return self.first(x)

def logits(width=24):
    return Logits(width)
'''
SPEC = """
name: zoo
output_dir: {output_dir}
seed: 3
max_steps: {steps}
model: {{type: python, entry: "zoo:mlp", kwargs: {{width: 24}}}}
dataset: {{type: python, entry: "zoo:points"}}
training:
  global_batch_size: 24
  micro_batch_size: 4
  optimizer: {{name: adamw, lr: 1e-2}}
cluster: {{workers_per_node: 3, device: cpu, heartbeat_timeout: 2s, max_restarts: 1}}
tiers:
  - {{type: memory, every: 1}}
  - {{type: disk, every: 4, keep: 2}}
"""


def zoo(folder: Path) -> Job:
    job = Job(folder)
    job.write_spec(SPEC)
    (folder / "zoo.py").write_text(ZOO)
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with cleaned(zoo(tmp_path / "job")) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with cleaned(zoo(tmp_path_factory.mktemp("zoo") / "job")) as made:
        ended = made.do("run", "spec.yaml")
        assert ended.code == 0, ended.said
        made.assert_nothing_left()
        yield made


@pytest.mark.parametrize(
    ("rank", "point"), [(2, "window.backward"), pytest.param(0, "window.forward", marks=pytest.mark.campaign)]
)
def test_three_ranks_killed_and_restarted_sum_in_the_same_order(rank: int, point: str, job: Job, oracle: Job) -> None:
    ended = job.do("run", "spec.yaml", fault=fail_at(rank, 7, point))
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    job.assert_nothing_left()


@pytest.mark.campaign
def test_divided_by_fsdp_it_is_killed_and_resumed_and_gathered_again(tmp_path: Path, job: Job) -> None:
    """Buffers, a tied pair, a frozen layer, a transposed weight, one without a gradient; then whole on each rank."""
    shard = "strategy.dp_shard=3"
    with cleaned(zoo(tmp_path / "unbroken")) as unbroken:
        for made, fault in ((unbroken, ""), (job, fail_at(2, 7, "window.backward"))):
            ended = made.do("run", "spec.yaml", shard, "max_steps=9", fault=fault)
            assert ended.code == 0, ended.said
        assert_same(job, unbroken)
    ended = job.do("resume", "--from", "latest", "run", "strategy.dp_shard=1", "max_steps=10")
    assert ended.code == 0, ended.said
    assert job.events("restored")[-1]["state_digest"] == job.events("finished")[0]["state_digest"]
    refused = job.do("run", "spec.yaml", shard, "model.entry=zoo:teacher", f"output_dir={job.folder / 'refused'}")
    assert refused.code == 78, refused.said
    assert "changes model.teacher.bias in its forward pass" in refused.said
    job.assert_nothing_left()


def test_the_plan_counts_the_model_without_running_it(job: Job) -> None:
    assert job.do("plan", "spec.yaml").code == 0
    ended = job.do("plan", "spec.yaml", "--profile", "--json")
    assert ended.code == 0, ended.said
    rests_on = json.loads(ended.out)["assumptions"]
    assert any(line.startswith("storage channel") and line.endswith("(measured)") for line in rests_on)
    assert not any(line.startswith("gradients") for line in rests_on), "their exchange was timed, too"
    failing = job.do("plan", "spec.yaml", "--profile", "model.entry=zoo:late")
    assert failing.code == 70
    assert "the model's first step failed: KeyError: 'DTRAIN_ATTEMPT'" in failing.said
    assert "zoo.py" in failing.said
    assert "dtrain/engine" not in failing.said


@pytest.mark.parametrize(
    ("entry", "code", "words", "step"),
    [
        ("zoo:nothing", 78, "zoo has no callable 'nothing'", 0),
        pytest.param("no_zoo:mlp", 78, "no module 'no_zoo'", 0, marks=pytest.mark.campaign),
        pytest.param("zoo:broken", 70, "ValueError: the layers do not fit", 0, marks=pytest.mark.campaign),
        ("zoo:logits", 78, "must return its mean loss", 0),
        ("zoo:late", 70, "MemoryError: no room for the activations", 6),
        ("zoo:diverging", 70, "the loss is nan at step 8", 7),
        ("zoo:growing", 78, "model.history was torch.float32 [1]", 0),
        ("zoo:tampering", 78, "model.first.weight was changed during a forward", 3),
    ],
)
def test_failing_code_is_named_in_one_line(entry: str, code: int, words: str, step: int, job: Job) -> None:
    ended = job.do("run", "spec.yaml", f"model.entry={entry}")
    assert ended.code == code, ended.said
    assert words in ended.said.replace("\n", " ")
    assert max(job.losses(), default=0) >= step
    if step:
        kept = max(e["step"] for e in job.events("committed") if e["tier"] == "disk")
        assert kept >= step - 1, "the last good state is on disk"
    assert not job.processes()


def test_row_91_a_program_that_cannot_start_is_started_once_and_its_traceback_shown(job: Job) -> None:
    (job.folder / "no_start.py").write_text("raise OSError('no such device: /dev/accelerator7')\n")
    ended = job.do("run", "spec.yaml", "model.entry=no_start:model", "cluster.max_restarts=5")
    assert ended.code in (70, 78), ended.said
    assert "no such device: /dev/accelerator7" in ended.said
    assert "no_start.py" in ended.said
    assert len(job.events("attempt")) <= 1
    assert not job.processes()


@pytest.mark.parametrize(
    ("override", "seen"),
    [
        ("model.entry=zoo:holds_gil", "forward"),
        pytest.param("dataset.entry=zoo:dozing", "__getitem__", marks=pytest.mark.campaign),
    ],
)
def test_however_a_rank_gets_stuck_it_is_named_with_its_stack(override: str, seen: str, job: Job, oracle: Job) -> None:
    ended = job.do("run", "spec.yaml", override)
    assert ended.code == 0, ended.said
    (fault,) = job.events("fault")
    assert (fault["kind"], fault["rank"]) == ("hang", 1), fault
    assert any(seen in frame for frame in fault["stack"]), fault
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_row_99_out_of_memory_and_a_barrier_on_the_way_out_ends_in_a_restart(job: Job, oracle: Job) -> None:
    """All ranks stand in the same pass then, each in a collective: their counters are alike."""
    ended = job.do("run", "spec.yaml", "model.entry=zoo:tidying")
    assert ended.code == 0, ended.said
    (fault,) = job.events("fault")
    assert (fault["kind"], fault["rank"]) == ("hang", 1), fault
    assert "MemoryError: no room for the gradients" in fault["detail"]
    assert any("barrier" in frame for frame in fault["stack"]), fault
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_a_rank_that_is_stuck_before_its_first_step_is_named_with_its_stack(job: Job, oracle: Job) -> None:
    ended = job.do("run", "spec.yaml", "model.entry=zoo:napping", "cluster.startup_timeout=4s")
    assert ended.code == 0, ended.said
    (fault,) = job.events("fault")
    assert (fault["kind"], fault["rank"], fault["step"]) == ("hang", 1, 0), fault
    assert "before its first step, building the model" in fault["detail"]
    assert any("napping" in frame for frame in fault["stack"]), fault
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_row_92_children_of_workers_do_not_outlive_them(job: Job) -> None:
    ended = job.do("run", "spec.yaml", "model.entry=zoo:parent", fault=fail_at(1, 6, "window.forward"))
    assert ended.code == 0, ended.said
    job.assert_nothing_left()


def test_parameters_that_the_model_changes_itself_are_of_the_right_step(job: Job, tmp_path: Path) -> None:
    with cleaned(zoo(tmp_path / "unbroken")) as unbroken:
        assert unbroken.do("run", "spec.yaml", "model.entry=zoo:teacher").code == 0
        fault = fail_at(0, 7, "update.before")
        ended = job.do("run", "spec.yaml", "model.entry=zoo:teacher", fault=fault)
        assert ended.code == 0, ended.said
        assert_same(job, unbroken)


@pytest.mark.parametrize("tiers", [pytest.param("[]", marks=pytest.mark.campaign), "[{type: disk, every: 4}]"])
def test_a_fault_that_returns_at_the_same_step_is_not_restarted_for_ever(tiers: str, job: Job) -> None:
    fault = fail_at(1, 6, "window.forward", attempt=None)
    ended = job.do("run", "spec.yaml", f"tiers={tiers}", fault=fault)
    assert ended.code == 70, ended.said
    assert len(job.events("fault")) == 2, "max_restarts is 1"
