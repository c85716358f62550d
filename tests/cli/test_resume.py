"""What `resume` finds out before anything is started: who the run is, and what it goes on from."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.checkpoints import SPEC, Run, dtrain
from tests.tiers.build import RUN_ID, manifest_of, snapshot

from dtrain.cli import resume as command
from dtrain.cli.train import Start
from dtrain.specs.codes import Code
from dtrain.specs.load import spec_to_json
from dtrain.specs.models import Spec
from dtrain.tiers.drain.drainer import DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import append_event, dumps, read, replace
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.lock import FileLock
from dtrain.tiers.reading.places import keep_former
from dtrain.tiers.stores.store import Place as Where
from dtrain.tiers.tier import disk_tier, open_tier


@dataclass
class Trained:
    """What the training was given."""

    runs: list[RunDir] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)

    def __call__(self, run: RunDir, spec: Spec, info: dict[str, Any], start: Start, *rest: object) -> Code:
        self.runs.append(run)
        self.ids.append(info["run_id"])
        self.starts.append(start)
        keep_former(run, start.former)
        replace(run.spec, dumps(spec_to_json(spec)))
        return Code.DONE

    @property
    def begun(self) -> tuple[str, int, int, str]:
        """Id, attempt and step and tier of the newest candidate of the last start."""
        first = self.starts[-1].candidates[0]
        return self.ids[-1], first.version.attempt, first.version.step, first.tier


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    monkeypatch.setattr("dtrain.cli.commands.stop_at_once", lambda _=False: None)
    return Run(tmp_path)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    made = Trained()
    monkeypatch.setattr(command, "train", made)
    return made


def spec_file(run: Run, *tiers: dict[str, Any]) -> Path:
    path = run.root.parent.parent / "spec.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "output_dir": str(run.run.root), "tiers": list(tiers)}))
    return path


def in_bucket(run: Run) -> dict[str, Any]:
    return {"type": "object", "url": run.bucket.as_uri(), "keep": 1}


def test_a_run_whose_folder_is_lost_goes_on_from_the_bucket_under_its_own_id(run: Run, trained: Trained) -> None:
    run.store_object(30, attempt=4)
    shutil.rmtree(run.run.root)
    ended = dtrain("resume", spec_file(run, {"type": "memory"}, {"type": "disk"}, in_bucket(run)))
    assert ended.code == 0, ended.err
    assert trained.begun == (RUN_ID, 4, 30, "object")


def test_a_folder_with_nothing_in_it_is_no_other_run(run: Run, trained: Trained) -> None:
    run.store_object(30)
    shutil.rmtree(run.run.root)
    run.run.root.mkdir()
    assert dtrain("resume", spec_file(run, {"type": "memory"}, in_bucket(run))).code == 0
    assert trained.begun == (RUN_ID, 1, 30, "object")


@pytest.mark.parametrize("where", ["memory", "disk", "object"])
def test_without_run_json_any_tier_tells_who_the_run_is(run: Run, trained: Trained, where: str) -> None:
    if where == "memory":
        run.store_memory(30)
    else:
        (run.store if where == "disk" else run.store_object)(30)
    run.run.run.unlink()
    assert dtrain("resume", run.run.root).code == 0
    assert trained.begun == (RUN_ID, 1, 30, where)
    assert not run.run.run.exists(), "it is written by the training, once it is clear that the places are its own"


def test_checkpoints_of_two_runs_name_no_run(run: Run, trained: Trained) -> None:
    run.store_object(30)
    other = disk_tier(run.root, "other")
    snapshot(run.memory, 40)
    manifest, sources = manifest_of(run.memory, run.memory.whole()[Version(1, 40)])
    other.write(type(manifest)({**manifest.body, "run_id": "other"}), sources)
    run.run.run.unlink()
    ended = dtrain("resume", run.run.root)
    assert ended.code == Code.BAD_SPEC
    assert RUN_ID in ended.err
    assert "other" in ended.err
    assert not run.run.run.exists()
    assert not trained.starts
    named = dtrain("resume", run.run.root, "--from", f"{run.bucket.as_uri()}/step-0000000030.a0001")
    assert named.code == 0, named.err
    assert trained.begun == (RUN_ID, 1, 30, "object")


def test_a_lost_folder_and_empty_tiers_are_nothing_to_resume_from(run: Run, trained: Trained) -> None:
    shutil.rmtree(run.run.root)
    spec = spec_file(run, {"type": "memory"}, {"type": "disk"}, in_bucket(run))
    ended = dtrain("resume", spec)
    assert ended.code == Code.DAMAGED
    assert "does not exist" in ended.err
    assert run.bucket.as_uri().removeprefix("file://") in ended.err, "it says where it has looked"
    assert not run.run.root.exists()
    assert not trained.starts


def test_a_lost_folder_and_a_bucket_that_does_not_answer_is_a_missing_resource(run: Run, trained: Trained) -> None:
    shutil.rmtree(run.run.root)
    run.bucket.write_text("not a folder")
    ended = dtrain("resume", spec_file(run, {"type": "memory"}, in_bucket(run)))
    assert ended.code == Code.MISSING_RESOURCE, ended.err
    assert not run.run.root.exists()
    assert not trained.starts


@pytest.mark.parametrize("start", ["latest", "7"])
def test_a_tier_that_cannot_be_read_is_a_missing_resource_and_not_the_end(
    run: Run, trained: Trained, start: str
) -> None:
    run.store(10)
    shutil.rmtree(disk := run.run.root / "checkpoints")
    disk.write_text("not a folder")
    ended = dtrain("resume", "--from", start, run.run.root, "max_steps=1000")
    assert ended.code == Code.MISSING_RESOURCE, ended.err
    assert "not known: the disk tier" in ended.err
    assert not trained.starts


def test_a_url_is_a_checkpoint_too(run: Run, trained: Trained) -> None:
    run.store_object(30)
    url = f"{run.bucket.as_uri()}/step-0000000030.a0001"
    assert dtrain("resume", run.run.root, "--from", url).code == 0
    assert trained.begun == (RUN_ID, 1, 30, "object")
    assert dtrain("resume", run.run.root, "--from", run.bucket.as_uri()).code == Code.USAGE
    gone = dtrain("resume", run.run.root, "--from", f"{run.bucket.as_uri()}/step-0000000031.a0001")
    assert gone.code == Code.DAMAGED
    assert "step 30 (object)" in gone.err


def test_a_url_outside_the_spec_is_found_by_itself(run: Run, trained: Trained) -> None:
    run.store_object(30)
    shutil.rmtree(run.run.root)
    spec = spec_file(run, {"type": "memory"}, {"type": "disk"})
    ended = dtrain("resume", spec, "--from", f"{run.bucket.as_uri()}/step-0000000030.a0001")
    assert ended.code == 0, ended.err
    assert trained.begun == (RUN_ID, 1, 30, "object")


def test_row_43_a_save_under_way_is_waited_for(run: Run, trained: Trained) -> None:
    """The launcher was killed; its drainer still carries step 30 when somebody resumes."""
    run.store(10)
    snapshot(run.store_memory(20), 30, slot=2)
    job = run.own.path / "drainer.json"
    tiers = (TierJob(Where("disk", str(run.root)), 2),)
    job.write_bytes(DrainJob(str(run.run.root), str(run.own.path), RUN_ID, tiers).to_bytes())
    environment = {**os.environ, "DTRAIN_FAULT": fail_at(None, None, "drain.*", kind="slow", attempt=None)}
    command = [sys.executable, "-m", "dtrain.tiers.drain.drainer", str(job)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment) as drainer:
        while not run.own.drainer_lock.exists() or FileLock(run.own.drainer_lock).holder_pid() != drainer.pid:
            assert drainer.poll() is None
            time.sleep(0.01)
        ended = dtrain("resume", run.run.root)
        assert drainer.wait(timeout=20) == 0
    assert ended.code == 0, ended.err
    assert "waiting for the drainer of the run before" in ended.out
    assert trained.begun == (RUN_ID, 1, 30, "disk")
    assert not run.own.path.exists()


def test_a_tier_that_is_no_longer_in_the_spec_is_still_looked_into(run: Run, trained: Trained) -> None:
    run.store(30)
    ended = dtrain("resume", run.run.root, "tiers=[{type: memory}, {type: disk, path: elsewhere}]")
    assert ended.code == 0, ended.err
    assert trained.begun == (RUN_ID, 1, 30, "disk")
    assert f"the disk tier {run.root} is no longer in the spec" in ended.out
    again = dtrain("resume", run.run.root)
    assert again.code == 0, "the new tiers have nothing yet"
    assert trained.begun == (RUN_ID, 1, 30, "disk")
    assert "no longer in the spec" not in again.out, "it is said once"
    assert dtrain("resume", run.run.root, "tiers=[{type: memory}, {type: disk}]").code == 0
    places = read(run.run.former)["places"]
    assert [Path(place["url"]).name for place in places] == ["bucket", "elsewhere"]


def test_a_refusal_is_a_document_too(run: Run) -> None:
    shutil.rmtree(run.run.root)
    ended = dtrain("resume", spec_file(run, {"type": "disk"}), "--json")
    assert json.loads(ended.out)["exit_code"] == Code.DAMAGED


def test_another_training_in_the_spec_s_file_is_refused_unless_it_is_meant(run: Run, trained: Trained) -> None:
    """Row 76."""
    run.store(30)
    path = spec_file(run, {"type": "memory"}, {"type": "disk"})
    changed = yaml.safe_load(path.read_text()) | {"seed": 8, "max_steps": 300, "cluster": {"workers_per_node": 2}}
    changed["training"]["optimizer"]["lr"] = 0.5
    path.write_text(yaml.safe_dump(changed))
    refused = dtrain("resume", path)
    assert refused.code == Code.BAD_SPEC
    assert "training.optimizer.lr: 0.001 → 0.5" in refused.err
    assert "--allow-changed seed --allow-changed training.optimizer.lr" in " ".join(refused.err.split())
    assert "max_steps" not in refused.err, "a later end is no other training"
    assert not trained.starts
    assert dtrain("resume", path, "--allow-changed", "seed").code == Code.BAD_SPEC
    assert dtrain("resume", path, "--allow-changed", "seed", "--allow-changed", "training").code == 0


def test_what_is_written_on_the_command_line_is_meant(run: Run, trained: Trained) -> None:
    run.store(30)
    ended = dtrain(
        "resume", run.run.root, "training.optimizer.lr=0.5", "model={type: gpt, n_layers: 2, d_model: 32, n_heads: 2}"
    )
    assert ended.code == 0, ended.err
    assert "changed: training.optimizer.lr: 0.001 → 0.5" in ended.out + ended.err
    assert len(trained.starts) == 1


SCHEDULED = {"name": "cosine"}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "the held-out part": ({"evaluation": {"every": 5, "fraction": 0.2}}, "evaluation.fraction: 0.0 → 0.2"),
    "an end towards which the rate falls": ({"max_steps": 300}, "max_steps: 200 → 300"),
}
SAME: dict[str, dict[str, Any]] = {
    "how the batch is divided": {"micro_batch_size": 2},
    "data of its own to evaluate on": {
        "evaluation": {"every": 5, "dataset": {"type": "text", "path": "x", "seq_len": 8}}
    },
}


def edited(run: Run, changed: dict[str, Any], scheduler: dict[str, Any] | None = None) -> Path:
    """The run's spec and a file that differs in `changed`."""
    path = spec_file(run, {"type": "memory"}, {"type": "disk"})
    values = yaml.safe_load(path.read_text())
    values["training"] |= {"scheduler": scheduler} if scheduler else {}
    replace(run.run.spec, dumps(spec_to_json(Spec.model_validate(values))))
    training = values["training"] | {key: value for key, value in changed.items() if key == "micro_batch_size"}
    values |= {key: value for key, value in changed.items() if key != "micro_batch_size"} | {"training": training}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_the_steps_to_come_is_asked_for_wherever_it_stands(run: Run, trained: Trained, name: str) -> None:
    run.store(30)
    changed, words = OTHERS[name]
    path = edited(run, changed, SCHEDULED)
    refused = dtrain("resume", path)
    assert refused.code == Code.BAD_SPEC, refused.err
    assert words in refused.err
    key = words.partition(":")[0]
    assert f"--allow-changed {key}" in refused.err
    assert dtrain("resume", path, "--allow-changed", key).code == 0
    assert len(trained.starts) == 1


def test_what_is_held_out_may_be_meant_by_any_key_that_says_it(run: Run, trained: Trained) -> None:
    run.store(30)
    assert dtrain("resume", run.run.root, "evaluation.every=5").code == Code.BAD_SPEC
    for words in (["evaluation={every: 5}"], ["evaluation.every=5", "evaluation.fraction=0.1"]):
        assert dtrain("resume", run.run.root, *words).code == 0


@pytest.mark.parametrize("name", SAME)
def test_what_says_only_how_the_same_is_computed_needs_no_word(run: Run, trained: Trained, name: str) -> None:
    run.store(30)
    ended = dtrain("resume", edited(run, SAME[name]))
    assert ended.code == 0, ended.err
    assert "changed: " in ended.out + ended.err


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "not yet said to be"])
def test_a_complete_run_says_so_and_never_that_it_is_another_now(run: Run, trained: Trained, finished: bool) -> None:
    run.store(200)
    if finished:
        append_event(run.run.events, "finished", 200, 1, steps=200)
        complete = dtrain("resume", run.run.root, "tiers=[{type: memory}, {type: disk, keep: 1}]")
        assert complete.code == 0
        assert "already complete at step 200" in complete.out
    before = run.run.spec.read_bytes()
    for words in (["training.optimizer.lr=0.5"], ["model.n_layers=2", "max_steps=200"]):
        refused = dtrain("resume", run.run.root, *words)
        assert refused.code == Code.BAD_SPEC, refused.out
        assert "the run is complete at step 200" in refused.err
        assert words[0].partition("=")[0] in refused.err
        assert "larger max_steps" in refused.err
    assert run.run.spec.read_bytes() == before
    assert not trained.starts
    assert dtrain("resume", run.run.root, "training.optimizer.lr=0.5", "max_steps=300").code == 0


READERS: dict[str, list[str]] = {
    "validate": ["validate"], "plan": ["plan"], "run": ["run"], "resume": ["resume"],
    "run --or-resume": ["run", "--or-resume"],
}  # fmt: skip


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_spec_is_read_once_so_that_it_may_come_from_a_pipe(
    run: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str, begun: bool
) -> None:
    monkeypatch.setattr("dtrain.cli.run.train", trained)
    if begun:
        run.store(10)
        append_event(run.run.events, "committed", 10, 1, tier="disk")
    text = spec_file(run, {"type": "memory"}, {"type": "disk"}).read_bytes()
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    try:
        ended = dtrain(*READERS[name], f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    expected = {("run", True): Code.BAD_SPEC, ("resume", False): Code.DAMAGED}.get((name, begun), Code.DONE)
    assert ended.code == expected, ended.err
    trains = expected == Code.DONE and name not in ("validate", "plan")
    assert [start.fresh for start in trained.starts] == [not begun] * trains


def test_row_76_a_lost_folder_is_no_way_round_the_question(run: Run, trained: Trained) -> None:
    """The checkpoint says what the run was trained by; its rate does not come back by itself either."""
    path = edited(run, {})
    snapshot(run.memory, 30)
    manifest, sources = manifest_of(run.memory, run.memory.whole()[Version(1, 30)])
    body = {**manifest.body, "spec": read(run.run.spec)}
    open_tier(Where("object", run.bucket.as_uri()), RUN_ID).write(type(manifest)(body), sources)
    shutil.rmtree(run.run.root)
    values = yaml.safe_load(path.read_text()) | {"tiers": [{"type": "memory"}, in_bucket(run)]}
    values["training"]["optimizer"]["lr"] = 0.5
    path.write_text(yaml.safe_dump(values))
    refused = dtrain("resume", path)
    assert refused.code == Code.BAD_SPEC
    assert "training.optimizer.lr: 0.001 → 0.5" in refused.err
    assert not trained.starts
    meant = dtrain("resume", path, "--allow-changed", "training.optimizer.lr")
    assert meant.code == 0, meant.err
    assert "changed: training.optimizer.lr: 0.001 → 0.5" in meant.out + meant.err
