"""`dtrain bench` with real workers: every method, one that fails, Ctrl-C; nothing is left behind."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
from tests.job.dtrain import SPEC, Job, document, finish, wait

from dtrain.planners.methods import METHODS
from dtrain.tiers.memory.slots import TMPFS

UNPICKLABLE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x).square().mean()
    def get_extra_state(self):
        return lambda: None

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((4,), i / 64)
"""


def snapshots(job: Job) -> list[Path]:
    """Folders on tmpfs of runs inside the job's folder; other runs of this user have theirs beside them."""
    owners = TMPFS.glob(f"dtrain-{os.getuid()}-*/owner.json")
    return [owner.parent for owner in owners if is_inside(owner, job)]


def is_inside(owner: Path, job: Job) -> bool:
    try:
        return str(job.folder) in owner.read_text()
    except FileNotFoundError:  # of a run that has just ended
        return False


def assert_as_before(job: Job, files: set[str]) -> None:
    wait(lambda: not job.processes(), 5, "the processes to end")
    assert snapshots(job) == []
    assert {path.name for path in job.folder.iterdir()} == files


def test_every_method_is_measured_and_nothing_is_left(job: Job) -> None:
    files = {path.name for path in job.folder.iterdir()}
    ended = job.do(
        "bench", "spec.yaml", "--methods", ",".join(METHODS), "--blocks", "2", "--steps-per-block", "2", "--json"
    )
    assert ended.code == 0, ended.said
    found = document(ended)
    assert found["failed"] == {}
    assert [method["method"] for method in found["methods"]] == list(METHODS)
    for method in found["methods"]:
        assert (method["blocks"], method["saves"]) == (2, 6)
        assert method["step_ratio"]["low"] <= method["step_ratio"]["median"] <= method["step_ratio"]["high"]
        assert method["blocked_s"] > 0
    by_name = {method["method"]: method for method in found["methods"]}
    state = found["state_bytes"]
    for name in ("dtrain", "dtrain-disk"):
        assert state <= by_name[name]["memory_bytes"] < 1.1 * state
    assert (by_name["dtrain"]["disk_saves"], by_name["dtrain"]["disk_bytes"]) == (0, 0)
    assert 1 <= by_name["dtrain-disk"]["disk_saves"] <= 6
    for name in ("torch-save", "torch-save-fsync", "dcp", "dcp-async-thread", "dcp-async-process"):
        assert by_name[name]["disk_saves"] == 6
        assert state <= by_name[name]["disk_bytes"] < 2 * state
    assert (by_name["null"]["memory_bytes"], by_name["null"]["disk_bytes"]) == (0, 0)
    assert found["plain"]["blocks"] == 1 + 2 * math.ceil(len(METHODS) / 2)
    assert "about" in ended.err
    assert_as_before(job, files)


@pytest.mark.campaign
def test_a_rival_that_fails_on_one_rank_is_left_out_and_the_others_are_measured(job: Job) -> None:
    (job.folder / "code.py").write_text(UNPICKLABLE)
    text = SPEC.replace(
        "{{type: gpt, n_layers: 2, d_model: 32, n_heads: 2, dropout: 0.1}}", "{{type: python, entry: 'code:Net'}}"
    )
    job.write_spec(text.replace("{{type: text, path: {text}, seq_len: 32}}", "{{type: python, entry: 'code:Data'}}"))
    files = {path.name for path in job.folder.iterdir()} | {"__pycache__"}
    ended = job.do("bench", "spec.yaml", "--methods", "torch-save,dtrain", "--blocks", "1", "--json")
    assert ended.code == 0, ended.said
    found = document(ended)
    assert [method["method"] for method in found["methods"]] == ["dtrain"]
    assert "pickle" in found["failed"]["torch-save"]
    assert "torch-save fails here and is left out" in ended.err
    (job.folder / "__pycache__").mkdir(exist_ok=True)
    assert_as_before(job, files)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "SIGINT"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.campaign)],
)
def test_a_stop_leaves_nothing(number: signal.Signals, words: str, job: Job) -> None:
    files = {path.name for path in job.folder.iterdir()}
    process = job.start(
        "bench", "spec.yaml", "--methods", "dtrain-disk,dcp-async-process", "--blocks", "1000", "--json"
    )
    wait(lambda: any(measured(path) for path in job.folder.glob(".dtrain-bench-*/bench.jsonl")), 60, "a block")
    assert len(snapshots(job)) == 1
    process.send_signal(number)
    ended = finish(process)
    assert ended.code == 130, ended.said
    assert document(ended)["message"].startswith(f"stopped by {words}")
    assert_as_before(job, files)


def measured(path: Path) -> bool:
    return any(
        json.loads(line)["what"] == "block"
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    )
