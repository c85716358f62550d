"""What lies in memory of other runs: only what provably nobody can use is removed, the rest is told of."""

import os
import shutil
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, snapshot

from dtrain.tiers.format.jsonfile import dumps, replace
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.lock import FolderLock
from dtrain.tiers.memory import slots as memory
from dtrain.tiers.memory.leftovers import sweep
from dtrain.tiers.memory.slots import MemoryDir, open_memory_dir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(memory, "TMPFS", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    made = RunDir(tmp_path / "mount" / "runs" / "mine")
    made.root.mkdir(parents=True)
    replace(made.run, dumps({"run_id": RUN_ID}))
    return made


@pytest.fixture
def snapshots(run: RunDir) -> MemoryDir:
    made = open_memory_dir(run, RUN_ID)
    snapshot(made, 7)
    return made


OUT_OF_REACH = ["moved", "unmounted", "deleted", "no run.json", "garbled", "another kind", "no id", "unreadable folder"]


def put_out_of_reach(run: RunDir, how: str) -> None:
    if how == "moved":
        run.root.rename(run.root.with_name("elsewhere"))
    elif how == "unmounted":
        shutil.rmtree(run.root.parent)
    elif how == "deleted":
        shutil.rmtree(run.root)
    elif how == "no run.json":
        run.run.unlink()
    elif how == "unreadable folder":
        shutil.rmtree(run.root)
        run.root.symlink_to(run.root)
    else:
        run.run.write_bytes({"garbled": b"{", "another kind": b"[]", "no id": b"{}"}[how])


@pytest.mark.parametrize("how", OUT_OF_REACH)
def test_snapshots_of_a_run_that_is_only_out_of_reach_stay_and_are_told_of(
    run: RunDir, snapshots: MemoryDir, how: str
) -> None:
    put_out_of_reach(run, how)
    swept = sweep()
    assert swept.removed == []
    assert Version(1, 7) in snapshots.whole()
    (line,) = swept.left
    assert f"rm -r {snapshots.path}" in line
    assert str(run.root) in line
    assert " MiB)" in line


def test_snapshots_whose_owner_file_is_garbled_stay(snapshots: MemoryDir) -> None:
    (snapshots.path / "owner.json").write_bytes(b"{")
    swept = sweep()
    assert swept.removed == []
    assert "does not say where it is" in swept.left[0]
    assert snapshots.whole()


def test_snapshots_of_a_run_that_another_has_replaced_go_and_that_is_said(run: RunDir, snapshots: MemoryDir) -> None:
    replace(run.run, dumps({"run_id": "another"}))
    swept = sweep()
    assert not snapshots.path.exists()
    assert swept.left == []
    (line,) = swept.removed
    assert str(snapshots.path) in line
    assert str(run.root) in line


def test_a_run_in_good_order_is_not_spoken_of(snapshots: MemoryDir) -> None:
    swept = sweep()
    assert (swept.removed, swept.left) == ([], [])
    assert snapshots.whole()


def test_what_a_live_run_holds_is_passed_over(run: RunDir, snapshots: MemoryDir) -> None:
    replace(run.run, dumps({"run_id": "another"}))
    with FolderLock(snapshots.path, shared=True):
        swept = sweep()
    assert (swept.removed, swept.left) == ([], [])
    assert snapshots.whole()


@pytest.mark.parametrize("young", [True, False])
def test_row_38_a_folder_without_anything_in_it_goes_once_nobody_can_be_making_it(run: RunDir, young: bool) -> None:
    path = memory.TMPFS / f"dtrain-{os.getuid()}-0123456789abcdef"
    path.mkdir()
    if not young:
        os.utime(path, (1, 1))
    assert len(sweep().removed) == (0 if young else 1)
    assert path.exists() == young
