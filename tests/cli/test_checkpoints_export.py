"""`export`: the weights of the newest whole checkpoint as a folder that other tools read, or one clear line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.cli.checkpoints import Run, dtrain, flip
from tests.cli.test_checkpoints import edit_manifest
from tests.tiers.build import RUN_ID, TENSORS

from dtrain.tiers import faults
from dtrain.tiers.lock import FolderLock


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    return Run(tmp_path)


def test_the_folder_says_where_its_weights_are_from(run: Run, tmp_path: Path) -> None:
    edit_manifest(run.store(10), spec=run.spec, ties={"model.head": "model.a"})
    inspected = dtrain("inspect", run.run.root, "--json").document
    ended = dtrain("export", run.run.root, tmp_path / "out", "--json")
    assert ended.code == 0
    told = ended.document
    assert (told["step"], told["tier"], told["out"]) == (10, "disk", str(tmp_path / "out"))
    assert told["tied"] == {"head": "a"}
    note = json.loads((tmp_path / "out" / "dtrain-export.json").read_text())
    assert note["state_digest"] == told["state_digest"] == inspected["state_digest"]
    assert (note["run_id"], note["step"], note["attempt"]) == (RUN_ID, 10, 1)
    assert note["spec"] == run.spec
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as opened:
        assert set(opened.keys()) == {info.name.removeprefix("model.") for info in TENSORS}


def test_a_step_a_tier_and_the_size_of_shards_can_be_chosen(run: Run, tmp_path: Path) -> None:
    run.store(10)
    run.store_object(10)
    run.store(20)
    ended = dtrain(
        "export", f"{run.run.root}@10", tmp_path / "new" / "out", "--max-shard", "8KB", "--tier", "object", "--json"
    )
    assert ended.code == 0
    assert (ended.document["step"], ended.document["tier"]) == (10, "object")
    assert len(ended.document["files"]) == 3
    people = dtrain("export", run.run.root, tmp_path / "other")
    assert people.out.startswith("model.safetensors ")
    assert "step 20" in people.err


def test_the_next_one_is_taken_when_the_newest_is_damaged_and_it_is_said(run: Run, tmp_path: Path) -> None:
    run.store(10)
    flip(run.store(20) / "rank-00001.safetensors")
    ended = dtrain("export", run.run.root, tmp_path / "out", "--json")
    assert ended.document["step"] == 10
    assert ended.document["passed_over"][0]["step"] == 20
    assert "passed over: step 20" in ended.err
    refused = dtrain("export", f"{run.run.root}@20", tmp_path / "other", "--json")
    assert refused.code == 65
    assert not (tmp_path / "other").exists()


def test_a_folder_with_something_in_it_is_2_with_a_remedy(run: Run, tmp_path: Path) -> None:
    run.store(10)
    (run.bucket.parent / "full").mkdir()
    (run.bucket.parent / "full" / "mine.txt").touch()
    ended = dtrain("export", run.run.root, run.bucket.parent / "full")
    assert ended.code == 2
    assert "give another folder" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("words", ["0", "x", "5parsec", "-1", ""])
def test_a_wrong_size_is_2(run: Run, tmp_path: Path, words: str) -> None:
    run.store(10)
    ended = dtrain("export", run.run.root, tmp_path / "out", f"--max-shard={words}")
    assert ended.code == 2
    assert "--max-shard" in ended.err
    assert ended.err.count("\n") == 1


def test_a_full_disk_is_69_in_one_line_and_nothing_is_left(run: Run, tmp_path: Path) -> None:
    run.store(10)
    there = sorted(os.listdir(tmp_path))

    def full(name: str, where: str, detail: object) -> None:
        if name == "disk.write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = faults.watch(full)
    try:
        ended = dtrain("export", run.run.root, tmp_path / "out")
    finally:
        faults.watch(before)
    assert ended.code == 69
    assert ended.err.count("\n") == 1
    assert f"{tmp_path / 'out'}: No space left on device: the export needs " in ended.err
    assert sorted(os.listdir(tmp_path)) == there


def test_two_exports_into_one_folder_are_not_mixed(run: Run, tmp_path: Path) -> None:
    run.store(10)
    half = tmp_path / ".out.dtrain-export"
    half.mkdir()
    with FolderLock(half):
        ended = dtrain("export", run.run.root, tmp_path / "out")
    assert ended.code == 69
    assert "another export" in ended.err


@pytest.mark.parametrize(
    "place",
    [
        "elsewhere/step-0000000012.a0001",
        "elsewhere/.tmp-step-0000000012.a0001",
        "run/weights",
        "run/logs/deep/weights",
        "run/checkpoints/weights",
        "run/checkpoints/step-0000000010.a0001/weights",
        "bucket/weights",
    ],
)
def test_nothing_is_exported_to_where_checkpoints_and_runs_are(run: Run, place: str) -> None:
    run.store(10)
    run.store_object(10)
    run.run.run.exists() or run.run.run.write_text("{}")
    roots = {"run": run.run.root, "bucket": run.bucket, "elsewhere": run.bucket.parent / "elsewhere"}
    first, _, rest = place.partition("/")
    out = roots[first] / rest.replace("checkpoints", run.root.name)
    ended = dtrain("export", run.run.root, out)
    assert ended.code == 2, ended.err
    assert str(out) in ended.err
    assert not out.exists()


def test_a_copy_of_a_checkpoint_is_exported_beside_its_folder(run: Run, tmp_path: Path) -> None:
    """The parent of a place of checkpoints is none."""
    folder = run.store(10)
    assert dtrain("export", folder, tmp_path / "weights").code == 0
