"""Locks, fault descriptions, copies, JSON files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers.build import Place

from dtrain.tiers import faults
from dtrain.tiers.format.digest import file_digest
from dtrain.tiers.format.jsonfile import Unreadable, append_line, read, read_lines, replace
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.lock import FileLock, Locked
from dtrain.tiers.memory.heartbeat import Heartbeat, clear_heartbeats, read_heartbeats
from dtrain.tiers.stores.copyfile import copy_durable


def test_a_second_holder_is_refused_and_told_who_holds(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"), pytest.raises(Locked, match=rf"process {os.getpid()} on .* since"):
        FileLock(tmp_path / "lock").__enter__()
    with FileLock(tmp_path / "lock"):
        pass


def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom dtrain.tiers.lock import FileLock\n"
        "lock = FileLock(Path(sys.argv[1])); lock.__enter__(); print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    holder = subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], capture_output=True, check=False)
    assert holder.stdout == b"held\n"
    with FileLock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 2**20 + 5])
def test_copies_are_exact_on_any_size(tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    assert copy_durable(source, tmp_path / "target") == file_digest(source)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    with pytest.raises(FileExistsError):
        copy_durable(source, tmp_path / "target")


def test_faults_are_data() -> None:
    text = faults.fail_at(1, 7, "window.forward") + ";" + faults.fail_at(None, None, "drain.begin", "raise", None)
    first, second = faults.parse(text)
    assert first.matches("window.forward", 7, 1, 1)
    assert not first.matches("window.forward", 7, 1, 2)
    assert second.matches("drain.begin", 99, None, 5)
    with pytest.raises(ValueError, match="no fault point"):
        faults.fail_at(0, 1, "nowhere")
    with pytest.raises(ValueError, match="cannot read"):
        faults.parse("nowhere:rank=1")
    slow = faults.fail_at(0, None, "memory.copy", "slow", factor=10)
    assert faults.parse(slow) == (faults.Fault("memory.copy", 0, kind="slow", factor=10),)
    for text in ("memory.copy", "memory.copy:kind=slow", "memory.copy:factor=2", "step.start:kind=slow:factor=2"):
        with pytest.raises(ValueError, match="cannot read"):
            faults.parse(text)
    with pytest.raises(ValueError, match="with a factor"):
        faults.fail_at(0, None, "memory.copy", "slow")


def test_a_fault_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for text in ("nowhere", "disk.write:kind=odd", "disk.write:step=x", "disk.write:colour=red"):
        code = "import dtrain.tiers.faults"
        environment = {**os.environ, "DTRAIN_FAULT": text}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
        assert ended.returncode == 2
        assert text.encode() in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_json_files_tell_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(Unreadable, match="No such file"):
        read(path)
    for content in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(Unreadable):
            read(path)
    path.write_bytes(b"{}" + b" " * 100)
    with pytest.raises(Unreadable, match="larger"):
        read(path, max_bytes=10)
    replace(path, b'{"a":1}')
    assert read(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b":')
    assert read_lines(path) == [{"a": 1}]
    assert read_lines(tmp_path / "none") == []


def test_attempt_numbers_are_never_used_twice(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert [run.next_attempt() for _ in range(3)] == [1, 2, 3]
    (run.logs / "attempt-9").mkdir()  # not a name of ours
    assert run.next_attempt() == 4


def test_heartbeats_reach_another_process(place: Place) -> None:
    writer = Heartbeat(place.memory, 3)
    writer.beat(17)
    writer.beat(17)
    (beat,) = read_heartbeats(place.memory)
    assert (beat.rank, beat.pid, beat.count, beat.step) == (3, os.getpid(), 2, 17)
    clear_heartbeats(place.memory)
    assert read_heartbeats(place.memory) == []
