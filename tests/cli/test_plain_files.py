"""A run's folder with anything but plain files in it: every command ends, with one line at most and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.checkpoints import Run

from dtrain.cli.view.tail import JsonLines, last_lines
from dtrain.tiers.format.jsonfile import Unreadable, append_event, append_line, read, read_lines


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    """Far larger than this machine's memory, and all of it holes."""
    with path.open("wb") as file:
        file.truncate(2**42)


ODD: list[Callable[[Path], None]] = [pipe, folder, device, endless]
MANIFEST = "checkpoints/step-0000000010.a0001/manifest.json"
CASES = [
    *((name, pipe) for name in ("spec.json", "run.json", "lock", "events.jsonl", "metrics.jsonl", MANIFEST)),
    *((name, odd) for name in ("spec.json", "events.jsonl", MANIFEST) for odd in (folder, device, endless)),
]
COMMANDS = [
    ["ls", "run"],
    ["inspect", "run@10"],
    ["verify", "run"],
    ["prune", "run"],
    ["export", "run", "out"],
    ["resume"],
    ["resume", "runs/it", "max_steps=10"],
]
EACH = """
import io, os, sys
from dtrain.cli import commands, resume
from dtrain.cli.checkpoints import export, inspect, ls, prune, verify
from dtrain.cli.main import main
for words in eval(sys.argv[1]):
    child = os.fork()
    if child == 0:
        sys.argv = ['dtrain', *words]
        main()
    sys.stderr.write(f'=> {words[0]} {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n')
    sys.stderr.flush()
"""


@pytest.mark.parametrize(("name", "odd"), CASES)
def test_no_command_waits_or_fails_badly(tmp_path: Path, name: str, odd: Callable[[Path], None]) -> None:
    run = Run(tmp_path)
    run.store(10)
    run.store(20)
    run.run.run.exists() or run.run.run.write_text(json.dumps({"run_id": "r", "import_paths": []}))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "it").symlink_to(run.run.root)
    path = run.run.root / name
    path.unlink(missing_ok=True)
    odd(path)
    ended = subprocess.run(
        [sys.executable, "-c", EACH, repr(COMMANDS)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in ended.stderr
    told = [line.split()[1:] for line in ended.stderr.splitlines() if line.startswith("=> ")]
    assert [name for name, _ in told] == [words[0] for words in COMMANDS], ended.stderr
    assert {int(code) for _, code in told} <= {0, 2, 65, 69, 78}, ended.stderr


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_every_reader_and_every_writer_of_lines_goes_on(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    path = tmp_path / "events.jsonl"
    odd(path)
    follower = JsonLines(path)
    assert follower.poll() == []
    assert last_lines(path) == []
    with pytest.raises(Unreadable):
        read(path)
    if odd is endless:
        assert read_lines(path) == []
        return
    assert not append_event(path, "warning", 1, 1)
    assert append_line(path, {}) is None
    with pytest.raises(OSError, match=r"regular|symbolic"):
        read_lines(path)
