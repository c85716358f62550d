"""Before a run begins: what is missing is named with figures and a remedy, and nothing is refused that would work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planners.build import tiny

from dtrain.engine import preflight as preflight_module
from dtrain.engine.preflight import MissingResource, preflight
from dtrain.engine.storage.room import OWN_FILES, RANK_BYTES, TENSOR_BYTES, check_room
from dtrain.planners.machine import Machine
from dtrain.planners.plan import Plan, make_plan
from dtrain.specs.models import Spec
from dtrain.tiers.format.layout import RunDir, Version, staging_name
from dtrain.tiers.memory.slots import TMPFS, MemoryDir
from dtrain.tiers.stores import object as object_module
from dtrain.tiers.stores.store import StoreError

LAPTOP = Machine(cpu_cores=2, host_memory_bytes=2**34, shm_free_bytes=2**33, accelerator="cpu")
DISK = {"type": "disk", "every": 10}
BLOCK = 4096


class Job:
    """A spec with its plan and its folders."""

    def __init__(self, root: Path, *tiers: dict[str, Any]) -> None:
        self.spec: Spec = tiny(tiers=list(tiers))
        self.plan: Plan = make_plan(self.spec, LAPTOP)
        self.run = RunDir(root / "run")
        self.memory = MemoryDir(root / "memory")
        tensors = self.plan.model.tensors or 0
        self.nbytes = (self.plan.model.state_bytes or 0) + 2 * RANK_BYTES + tensors * TENSOR_BYTES
        """Of one checkpoint of the two ranks."""

    def preflight(self) -> None:
        preflight(self.spec, self.plan, self.run, self.memory)

    def refusal(self) -> str:
        with pytest.raises(MissingResource) as caught:
            self.preflight()
        return str(caught.value)

    def warnings(self) -> tuple[str, ...]:
        return preflight(self.spec, self.plan, self.run, self.memory)


class Disk:
    """What statvfs says of every file system but that of the snapshots."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.files, self.all_files = 2**40, 10**6, 10**7
        self._asked = os.statvfs
        patch.setattr(os, "statvfs", self._answer)

    def _answer(self, path: object) -> object:
        if str(path) == str(TMPFS):
            return self._asked(TMPFS)
        assert Path(str(path)).exists()
        return SimpleNamespace(f_bavail=self.nbytes, f_frsize=1, f_favail=self.files, f_files=self.all_files)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def hold(folder: Path, name: str, nbytes: int) -> int:
    """Put a file of some size into a folder; returns what the folder takes."""
    (folder / name).mkdir(parents=True)
    file = folder / name / "rank-00000.safetensors"
    file.write_bytes(b"x" * nbytes)
    return file.stat().st_blocks * 512


def test_a_run_with_room_for_everything_begins_without_a_word(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK, {"type": "object", "url": f"file://{tmp_path}/far"})
    job.preflight()
    assert job.warnings() == ()
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_one_checkpoint_the_run_is_refused_with_figures_and_a_remedy(
    tmp_path: Path, disk: Disk
) -> None:
    job = Job(tmp_path, DISK)
    disk.nbytes = job.nbytes - 1
    assert job.refusal() == (
        f"the disk tier in {tmp_path}/run/checkpoints needs room for one checkpoint: {job.nbytes:,} bytes, "
        f"free are {job.nbytes - 1:,}; free some, or give another path"
    )
    disk.nbytes = job.nbytes
    job.preflight()


def test_without_files_for_one_checkpoint_the_run_is_refused(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK)
    one = 2 + 1 + 1 + OWN_FILES  # shards, manifest, folder
    disk.files = one - 1
    assert f"{one} files, free are {one - 1}; free some" in job.refusal()
    disk.files = one
    job.preflight()
    disk.files = disk.all_files = 0  # file systems without inode tables say 0 of 0
    assert job.warnings() == ()
    job.preflight()


def test_without_room_for_all_of_them_the_run_begins_with_a_warning(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK | {"keep": 2, "keep_every": 50})
    most = (2 + 1 + 4) * job.nbytes
    disk.nbytes = most - 1
    job.preflight()
    assert job.warnings() == (
        f"the disk tier in {tmp_path}/run/checkpoints needs more room before the run is over: {most:,} bytes, "
        f"free are {most - 1:,}; free some, or give another path, or keep fewer",
    )
    disk.nbytes, disk.files = most, 7 * 4 + OWN_FILES - 1
    assert f"{7 * 4 + OWN_FILES} files, free are" in job.warnings()[0]
    disk.files += 1
    assert job.warnings() == ()


def test_what_the_run_holds_already_is_not_needed_again(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK)
    held = hold(job.run.disk("checkpoints"), Version(1, 10).dirname, 10 * BLOCK)
    hold(job.run.disk("checkpoints"), "somebody-else-s", 10 * BLOCK)
    disk.nbytes = 4 * job.nbytes - held
    assert job.warnings() == ()
    disk.nbytes -= 1
    assert f"{4 * job.nbytes - held:,} bytes, free are {4 * job.nbytes - held - 1:,}" in job.warnings()[0]


def test_one_checkpoint_more_must_fit_however_much_is_there(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK | {"keep": 1})
    for step in (10, 20, 30):
        hold(job.run.disk("checkpoints"), Version(1, step).dirname, job.nbytes)
    disk.nbytes = job.nbytes
    assert job.warnings() == ()
    disk.nbytes -= 1
    assert "room for one checkpoint" in job.refusal()


def test_what_is_deleted_at_the_start_counts_as_free(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK)
    freed = hold(job.run.disk("checkpoints"), staging_name(Version(1, 10).dirname), 10 * BLOCK)
    disk.nbytes = job.nbytes - freed
    job.preflight()
    disk.nbytes -= 1
    assert f"free are {job.nbytes - 1:,}" in job.refusal()


def test_tiers_of_one_file_system_share_its_room(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK, {"type": "object", "url": f"file://{tmp_path}/far", "every": 20, "keep": 1})
    disk.nbytes = 2 * job.nbytes - 1
    refusal = job.refusal()
    assert f"run/checkpoints and the object tier in {tmp_path}/far need room for one checkpoint each" in refusal
    assert f"{2 * job.nbytes:,} bytes" in refusal
    assert "give another path or url" in refusal
    disk.nbytes = (4 + 2) * job.nbytes - 1
    job.preflight()
    assert f"{6 * job.nbytes:,} bytes" in job.warnings()[0]


def test_a_folder_that_cannot_be_written_is_refused_for_every_tier(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "file").write_text("")
    path, far = f"{tmp_path}/file/checkpoints", f"file://{tmp_path}/file/far"
    lines = Job(tmp_path, DISK | {"path": path}, {"type": "object", "url": far}).refusal().splitlines()
    assert lines == [
        f"the disk tier's folder {path} cannot be used: {tmp_path}/file is no folder; give another path",
        f"the object tier's folder {tmp_path}/file/far cannot be used: {tmp_path}/file is no folder; give another url",
    ]


def test_an_unknown_size_refuses_nothing(tmp_path: Path, disk: Disk) -> None:
    job = Job(tmp_path, DISK)
    disk.nbytes = disk.files = 0
    job.plan = make_plan(tiny(tiers=[DISK], model={"type": "python", "entry": "m:f"}), LAPTOP)
    job.preflight()
    assert job.warnings() == ()


def test_a_bucket_without_its_package_is_refused_with_what_to_install(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise StoreError("the object tier needs one more package: pip install 'dtrain[object]'")

    monkeypatch.setattr(object_module, "_library", missing)
    disk.nbytes = 0
    job = Job(tmp_path, {"type": "object", "url": "s3://bucket/run"})
    assert job.refusal().endswith("pip install 'dtrain[object]'")


def test_rows_38_and_52_too_little_memory_for_snapshots_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, {"type": "memory"})
    needed = 3 * (job.plan.model.state_bytes or 0)
    usage = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: usage)
    assert f"snapshots need {needed:,} bytes in /dev/shm (3 slots), free are {usage.free:,}" in job.refusal()
    usage.free += 1
    job.preflight()
    Job(tmp_path).preflight()


def test_row_38_a_tmpfs_without_room_for_more_files_is_refused(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = preflight_module.OWN_FILES + 2 * preflight_module.RANK_FILES
    real = os.statvfs

    def few(path: object) -> object:
        if str(path) == str(TMPFS):
            return SimpleNamespace(
                f_files=100, f_favail=files, f_bavail=2**30, f_blocks=2**30, f_bfree=2**30, f_frsize=1
            )
        return real(path)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "statvfs", few)
    for tiers in ([], [{"type": "memory"}]):
        job, files = Job(tmp_path, *tiers), needed - 1
        assert f"snapshots need {needed} files in /dev/shm, free are {files}; " in job.refusal()
        files = needed
        job.preflight()


REAL = """
import sys
from pathlib import Path
from dtrain.engine.storage.room import check_room
from dtrain.planners.machine import Machine
from dtrain.planners.plan import make_plan
from dtrain.specs.models import Spec
from dtrain.tiers.format.layout import RunDir
spec = Spec.model_validate_json(sys.argv[1])
plan = make_plan(spec, Machine(cpu_cores=2, host_memory_bytes=None, shm_free_bytes=None, accelerator="cpu"))
room = check_room(spec, plan, RunDir(Path("/nowhere")))
print(*room.problems, *room.warnings, sep="\\n")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=8m", "room for one checkpoint: 11,136,668 bytes, free are 8,388,608"),
        ("size=16m", "more room before the run is over: 44,546,672 bytes, free are 16,777,216"),
        ("size=64m", ""),
        ("size=64m,nr_inodes=6", "room for one checkpoint: 8 files, free are 5"),
        ("size=64m,nr_inodes=16", "more room before the run is over: 20 files, free are 15"),
        ("size=64m,ro", "lies on a file system that is mounted read-only; give another path"),
    ],
)
def test_a_real_file_system_is_measured(tmp_path: Path, options: str, words: str) -> None:
    spec = tiny(tiers=[DISK | {"path": str(tmp_path / "deep" / "er")}])
    mounted = f"mount -t tmpfs -o {options} tmpfs '{tmp_path}' || exit 77"
    script = f'{mounted}; exec "$0" -c "$1" "$2"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(
        [*command, sys.executable, REAL, spec.model_dump_json()], capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout if words else done.stdout == "\n"


def test_asking_changes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, DISK, {"type": "object", "url": f"file://{tmp_path}/far"})
    assert check_room(job.spec, job.plan, job.run).problems == ()
    assert list(tmp_path.iterdir()) == []
