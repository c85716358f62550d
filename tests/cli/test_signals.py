"""Ctrl-C while a command is still importing what it works with, and when its answer is there already."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.checkpoints import Run
from tests.tiers.build import Place, snapshot

EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
module = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from dtrain.cli.main import main
main()
"""
LATE = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
from dtrain.cli.main import main
main()
"""
BEFORE_TRAINING = """
import os, signal, sys
from pathlib import Path
from dtrain.cli.terminal.refusal import stop_at_once, tidied
from dtrain.tiers.memory.slots import MemoryDir
number, folder, drawn = sys.argv[1:]
stop_at_once()
with tidied(MemoryDir(Path(folder)).remove_unneeded):
    if drawn == "signal":
        os.kill(os.getpid(), int(number))
"""
DOCUMENT = """
import os, signal
from dtrain.cli.terminal.refusal import stop_at_once
stop_at_once(as_json=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
COMMANDS = ["validate", "plan", "ls", "inspect", "verify", "prune", "export"]


def words(run: Run, command: str, tmp_path: Path) -> list[str]:
    target = tmp_path / "spec.yaml" if command in ("validate", "plan") else run.run.root
    return [command, str(target), *([str(tmp_path / "out")] if command == "export" else [])]


@pytest.mark.parametrize("module", ["dtrain.cli.commands", "pydantic._internal._generate_schema", "dtrain.specs.load"])
@pytest.mark.parametrize("command", COMMANDS)
def test_row_93_ctrl_c_in_an_import_is_one_line_and_130(tmp_path: Path, command: str, module: str) -> None:
    run = Run(tmp_path)
    run.store(1)
    ended = subprocess.run(
        [sys.executable, "-c", EARLY, module, *words(run, command, tmp_path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "interrupted\n", "")


def test_ctrl_c_after_the_answer_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.store(1)
    command = [sys.executable, "-c", LATE, "ls", str(run.run.root)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "whole" in ended.stdout


def test_stopped_before_the_first_step_a_command_still_gives_its_document() -> None:
    ended = subprocess.run([sys.executable, "-c", DOCUMENT], capture_output=True, text=True, check=False, timeout=60)
    message = "stopped by SIGTERM before the first step; nothing was stored"
    assert (ended.returncode, ended.stderr) == (130, f"{message}\n")
    assert json.loads(ended.stdout) == {"status": "interrupted", "exit_code": 130, "message": message}


@pytest.mark.parametrize("way", ["signal", "end"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("needed", [True, False])
def test_before_training_a_command_takes_its_memory_away_unless_it_is_to_go_on_from_there(
    tmp_path: Path, number: signal.Signals, needed: bool, way: str
) -> None:
    """A run that was stopped while it looked at its tiers left a folder that nobody would ever have taken away."""
    memory = Place(tmp_path).memory
    (memory.path / "owner.json").write_text("{}")
    if needed:
        snapshot(memory, 3)
    ended = subprocess.run(
        [sys.executable, "-c", BEFORE_TRAINING, str(int(number)), str(memory.path), way],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == (130 if way == "signal" else 0), ended.stderr
    assert memory.path.exists() is needed
