"""The run's folder while the run goes on: its disk is full, or somebody removes it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import COMMAND, STEPS, Job, finish, wait_for_step

from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.slots import memory_dir

SLOW = ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(2, STEPS + 1))


def test_a_folder_that_is_removed_ends_the_run_with_one_line(job: Job) -> None:
    process = job.start("run", "spec.yaml", fault=SLOW)
    wait_for_step(job, 3)
    while job.run.root.exists():
        shutil.rmtree(job.run.root, ignore_errors=True)  # again where a file was made meanwhile, as a person does
    ended = finish(process)
    assert ended.code == 69, ended.said
    assert "was removed while the run went on" in ended.said
    assert "Traceback" not in ended.said
    assert not job.run.root.exists(), "nothing makes it again"
    job.assert_nothing_left()


def test_a_folder_that_is_moved_takes_its_snapshots_along(job: Job, oracle: Job) -> None:
    process = job.start("run", "spec.yaml", "tiers=[{type: memory}, {type: disk, every: 100}]", fault=SLOW)
    wait_for_step(job, 4)
    moved = RunDir(job.folder / "elsewhere" / "moved")
    moved.root.parent.mkdir()
    job.run.root.rename(moved.root)
    try:
        ended = finish(process)
        assert ended.code == 69, ended.said
        assert f"was moved to {moved.root} while the run went on" in ended.said
        assert not job.run.root.exists(), "nothing makes it again"
        assert not memory_dir(job.run).path.exists()
        again = job.do("resume", str(moved.root))
        assert again.code == 0, again.said
    finally:
        memory_dir(moved).remove()
    moved.root.rename(job.run.root)
    assert job.events("restored")[0]["tier"] == "memory"
    assert job.events("restored")[0]["step"] >= 3
    assert job.digest() == oracle.digest()
    job.assert_nothing_left()


@pytest.mark.campaign
def test_on_failure_stop_says_that_it_stops_and_never_that_it_restarts(job: Job) -> None:
    stop = "tiers=[{type: memory}, {type: disk, every: 1, on_failure: stop}]"
    fault = fail_at(None, 1, "drain.file", kind="eio", attempt=None)
    ended = job.do("run", "spec.yaml", stop, fault=";".join([fault, SLOW]))
    assert ended.code == 69, ended.said
    assert "on_failure is stop" in ended.said
    assert "restarting" not in ended.said
    assert len(job.events("attempt")) == 1


@contextlib.contextmanager
def _small_tmpfs(folder: Path) -> Iterator[list[str]]:
    """The words that run a command in a mount namespace of its own, with a file system of 4 MiB in `folder`."""
    folder.mkdir(parents=True)
    words = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=4m tmpfs "{folder}" && exec "$@"', "sh"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace here: {error}")
    yield words


FULL = """
import subprocess, sys, time
from pathlib import Path
root = Path(sys.argv[1])
process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
while not (root / 'metrics.jsonl').exists() or (root / 'metrics.jsonl').read_bytes().count(b'\\n') < 2:
    time.sleep(0.05)
ballast = root / 'ballast'
with ballast.open('wb', buffering=0) as file:
    try:
        while True:
            file.write(b'x' * 4096)
    except OSError:
        pass
said = process.communicate(timeout=90)[0]
sys.stdout.buffer.write(said)
print('EVENTS', (root / 'events.jsonl').read_text())
for path in root.rglob('*.log'):
    print('LOG', path.read_text(errors='replace'))
sys.exit(process.returncode)
"""


def test_a_full_disk_under_the_run_ends_nobody_and_is_told_once(job: Job) -> None:
    folder = job.run.root.parent / "small"
    with _small_tmpfs(folder) as words:
        tiers = f"tiers=[{{type: memory}}, {{type: disk, path: '{job.folder}/elsewhere', every: 3}}]"
        long = ["max_steps=60", "model.d_model=16", f"output_dir={folder}/run", tiers]
        ended = subprocess.run(
            [*words, sys.executable, "-c", FULL, f"{folder}/run", *COMMAND, "run", str(job.spec), *long],
            cwd=job.folder, capture_output=True, text=True, check=False, timeout=150,
            env={**os.environ, "DTRAIN_FAULT": SLOW, "COLUMNS": "400"},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout
    assert "Logging error" not in ended.stdout
    full = os.strerror(errno.ENOSPC)
    assert ended.stdout.count(f"metrics.jsonl: {full}: lines are lost, training goes on") == 1
    assert "finished" in ended.stdout


def test_a_full_disk_that_is_to_stop_the_run_stops_it_and_says_why(job: Job) -> None:
    folder = job.run.root.parent / "small"
    with _small_tmpfs(folder) as words:
        tiers = "tiers=[{type: memory}, {type: disk, every: 3, on_failure: stop}]"
        long = ["max_steps=60", "model.d_model=16", f"output_dir={folder}/run", tiers]
        ended = subprocess.run(
            [*words, sys.executable, "-c", FULL, f"{folder}/run", *COMMAND, "run", str(job.spec), *long],
            cwd=job.folder, capture_output=True, text=True, check=False, timeout=150,
            env={**os.environ, "DTRAIN_FAULT": SLOW, "COLUMNS": "400"},
        )  # fmt: skip
    assert ended.returncode == 69, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout
    assert "restarting" not in ended.stdout
    assert "on_failure is stop: " in ended.stdout
    memory_dir(RunDir(folder / "run")).remove()
