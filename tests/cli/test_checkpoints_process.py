"""The commands on checkpoints as processes: no torch, quick with many checkpoints, quiet pipes, clean interrupts."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.checkpoints import Run

from dtrain.tiers.format.manifest import Manifest

CODE = """
import sys
from dtrain.cli.main import main
sys.argv = ['dtrain', *sys.argv[1:]]
try:
    main()
finally:
    sys.stderr.write('TORCH' if 'torch' in sys.modules else 'CLEAN')
"""
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from dtrain.tiers import faults
def slow(name, where, detail):
    if where.endswith('.safetensors'):
        sys.stderr.write('reading\\n'); sys.stderr.flush()
        time.sleep(60)
faults.watch(slow)
from dtrain.cli.main import main
sys.argv = ['dtrain', *sys.argv[1:]]
main()
"""


def do(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def copies(run: Run, count: int) -> None:
    """The same checkpoint under many steps, each with a manifest of its own."""
    folder = run.store(1)
    body = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    for step in range(2, count + 1):
        copy = folder.with_name(f"step-{step:010d}.a0001")
        copy.mkdir()
        for file in folder.glob("rank-*"):
            os.link(file, copy / file.name)
        (copy / "manifest.json").write_bytes(Manifest(body | {"step": step}).to_bytes())


def test_a_thousand_checkpoints_are_listed_without_torch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    copies(run, 1000)
    started = time.monotonic()
    ended = do("ls", run.run.root, "--json")
    sys.stdout.write(f"dtrain ls of 1,000 checkpoints: {time.monotonic() - started:.2f} s\n")
    assert ended.returncode == 0
    assert ended.stderr == "CLEAN"
    assert [row["step"] for row in json.loads(ended.stdout)["checkpoints"]] == list(range(1000, 0, -1))


def test_verify_prune_and_export_need_no_torch_and_keep_stdout_for_the_document(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (10, 20, 30):
        run.store(step)
    for words in (
        ("inspect", run.run.root),
        ("verify", run.run.root),
        ("prune", run.run.root),
        ("export", run.run.root, tmp_path / "out"),
    ):
        ended = do(*words, "--json")
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == "CLEAN", "no bar where stderr is no terminal"
        json.loads(ended.stdout)


def test_a_terminal_gets_a_bar_on_stderr_and_the_answer_on_stdout(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.store(10)
    ours, theirs = pty.openpty()
    ended = subprocess.run(
        [sys.executable, "-c", CODE, "verify", str(run.run.root), "--json"],
        stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=60, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert ended.returncode == 0
    assert "step 10 (attempt 1) in disk" in drawn
    assert json.loads(ended.stdout)["checkpoints"][0]["good"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["verify", "export", "prune"])
def test_a_signal_ends_a_command_that_works_without_a_traceback_and_nothing_is_left(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    run = Run(tmp_path)
    for step in (10, 20, 30):
        run.store(step)
    shutil.rmtree(tmp_path / "memory")
    there = sorted(str(path) for path in tmp_path.rglob("*"))
    more = [str(tmp_path / "out")] if command == "export" else []
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, command, str(run.run.root), *more], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "reading\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    left = {"lock"} if command == "prune" else set()
    new = {str(Path(path).name) for path in {str(path) for path in tmp_path.rglob("*")} - set(there)}
    assert new - left == set()
