"""Trustworthy storage, end to end: what is bad is never kept, and a tier that fails costs no state and no step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import STEPS, Job, assert_same, cleaned, finish, wait, wait_for_step

from dtrain.tiers.faults import fail_at
from dtrain.tiers.memory.slots import memory_dir

CLIFF = '''
import torch
from torch import nn

class Cliff(nn.Module):
    """Its update in step `at` takes a weight beyond the largest number of its dtype; the loss never tells."""

    def __init__(self, at):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.edge = nn.Parameter(torch.full((3,), 60000.0, dtype=torch.float16))
        self.at = at
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        pull = (self.edge - self.edge.detach()).nan_to_num(0.0).float().sum()
        return ((x * self.weight).sum(dim=1) - 1).square().mean() - 30000.0 * (self.passes == self.at) * pull

def cliff(at):
    return Cliff(at)

class points:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.sin(torch.arange(4.0) * (index + 1))
'''
CLIFF_SPEC = """
name: cliff
output_dir: {output_dir}
seed: 3
max_steps: {steps}
model: {{type: python, entry: "cliff:cliff", kwargs: {{at: 17}}}}
dataset: {{type: python, entry: "cliff:points"}}
training:
  global_batch_size: 8
  micro_batch_size: 4
  optimizer: {{name: sgd, lr: 1.0}}
cluster: {{workers_per_node: 2, device: cpu, heartbeat_timeout: 2s}}
tiers:
  - {{type: memory, every: 1}}
  - {{type: disk, every: 3, keep: 3}}
"""


@pytest.fixture
def cliff(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "cliff")
    made.write_spec(CLIFF_SPEC, steps=24)
    (made.folder / "cliff.py").write_text(CLIFF)
    with cleaned(made):
        yield made


def slowed(*steps: int) -> list[str]:
    """Faults that make these steps last half a second longer."""
    return [fail_at(0, step, "step.start", kind="slow") for step in steps]


def on_disk(job: Job, folder: str = "checkpoints") -> list[int]:
    """Steps of the committed checkpoints in a folder of the run."""
    return sorted(int(path.parent.name[5:15]) for path in (job.run.root / folder).glob("step-*/manifest.json"))


def left_out(job: Job, tier: str) -> list[str]:
    return [str(event["reason"]) for event in job.events("skipped") if event["tier"] == tier]


def test_row_75_a_weight_that_becomes_infinite_is_never_the_newest_good_state(cliff: Job) -> None:
    ended = cliff.do("run", "spec.yaml")
    assert ended.code == 70, ended.said
    assert "model.edge holds NaN or infinity after the update of step 17" in ended.said.replace("\n", " ")
    assert "the state of step 16 was kept" in ended.said.replace("\n", " ")
    assert max(event["step"] for event in cliff.events("committed")) == 16
    assert on_disk(cliff) == [12, 15, 16], "good ones are not rotated out"
    assert not cliff.events("finished")
    cliff.assert_nothing_left()
    mended = cliff.do("resume", "--from", "latest", "run", "model.kwargs.at=1000")
    assert mended.code == 0, mended.said
    assert [event["step"] for event in cliff.events("restored")] == [16]
    cliff.assert_nothing_left()


def test_row_75_in_the_last_step_the_run_is_not_called_finished(cliff: Job) -> None:
    ended = cliff.do("run", "spec.yaml", "max_steps=17", "checkpoint.non_finite=skip")
    assert ended.code == 70, ended.said
    assert not cliff.events("finished")
    assert max(on_disk(cliff)) == 16
    cliff.assert_nothing_left()


def test_on_failure_stop_ends_with_69_and_the_memory_keeps_the_state(job: Job, oracle: Job) -> None:
    stop = "tiers=[{type: memory}, {type: disk, every: 3, keep: 3, on_failure: stop}]"
    fault = fail_at(None, 6, "drain.file", kind="eio", attempt=None)
    ended = job.do("run", "spec.yaml", stop, fault=";".join([fault, *slowed(*range(8, STEPS + 1))]))
    assert ended.code == 69, ended.said
    assert "on_failure is stop" in ended.said
    assert "Input/output error" in " ".join(left_out(job, "disk"))
    assert on_disk(job) == [3]
    kept = max(version.step for version in memory_dir(job.run).whole())
    assert kept == max(job.losses()) < STEPS
    again = job.do("resume", "--from", "latest", "run")
    assert again.code == 0, again.said
    assert [(event["tier"], event["step"]) for event in job.events("restored")] == [("memory", kept)]
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_on_failure_continue_trains_on_and_the_tier_comes_back(job: Job, oracle: Job) -> None:
    fault = fail_at(None, 3, "drain.file", kind="eio", attempt=None)
    full = fail_at(None, None, "disk.write", kind="enospc", attempt=None, nth=9)
    ended = job.do("run", "spec.yaml", fault=";".join([fault, full, *slowed(*range(4, STEPS + 1))]))
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    reasons = " ".join(left_out(job, "disk"))
    assert "Input/output error" in reasons
    assert any("works again" in event["detail"] for event in job.events("warning"))
    assert max(on_disk(job)) == STEPS
    job.assert_nothing_left()


def test_a_disk_that_fails_for_good_is_gone_round_to_the_object_tier(job: Job, oracle: Job) -> None:
    both = (
        "tiers=[{type: memory}, {type: disk, path: disk, every: 3}, "
        f"{{type: object, url: 'file://{job.run.root}/object', every: 3}}]"
    )
    process = job.start("run", "spec.yaml", both, fault=";".join(slowed(*range(4, STEPS + 1))))
    wait(lambda: on_disk(job, "object"), 30, "the first checkpoint to come through")
    disk = job.run.root / "disk"
    disk.rename(job.run.root / "unplugged")
    disk.write_bytes(b"")
    ended = finish(process)
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    assert left_out(job, "disk")
    assert max(on_disk(job, "object")) == STEPS
    assert not memory_dir(job.run).path.exists()


def test_committed_by_manifest_a_cut_leaves_the_older_step(job: Job, oracle: Job) -> None:
    """As on a mounted bucket, where no rename is one change; the memory is lost too."""
    by_manifest = "tiers=[{type: memory}, {type: disk, every: 3, keep: 3, commit: manifest}]"
    fault = fail_at(None, 6, "drain.manifest", kind="stop", attempt=None)
    process = job.start("run", "spec.yaml", by_manifest, fault=fault)
    wait_for_step(job, 7)
    wait(job.stopped, 10, "the fault")
    job.kill_all()
    finish(process)
    assert (job.run.root / "checkpoints" / "step-0000000006.a0001").is_dir()
    assert on_disk(job) == [3]
    memory_dir(job.run).remove()
    ended = job.do("resume", "--from", "latest", "run")
    assert ended.code == 0, ended.said
    assert [(event["tier"], event["step"]) for event in job.events("restored")] == [("disk", 3)]
    assert_same(job, oracle)
    job.assert_nothing_left()
