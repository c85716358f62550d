"""The help of the commands: its examples are command lines that parse, its brackets are not taken for markup."""

import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from dtrain.cli.commands import app
from dtrain.cli.terminal.epilogs import EXAMPLES
from dtrain.specs.codes import Code

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(*words: str) -> str:
    ended = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert ended.exit_code == 0
    return " ".join(ended.output.split())


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == {"", *COMMANDS}


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_are_shown_and_are_command_lines_that_parse(command: str) -> None:
    help_text = shown(*([command] if command else []))
    for line in EXAMPLES[command]:
        assert f"dtrain {line}" in help_text
        name, *words = shlex.split(line.partition(" > ")[0])
        assert not command or name == command
        COMMANDS[name].make_context(name, words)


def test_python_runs_it_as_a_module() -> None:
    """Where the folder of its script is not on the path."""
    ended = subprocess.run(
        [sys.executable, "-m", "dtrain", "run", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, "python -m dtrain run" in ended.stdout) == (0, True), ended.stderr


def test_the_help_of_dtrain_tells_every_exit_code() -> None:
    help_text = shown().partition("Exit codes:")[2]
    assert all(f"{int(code)} " in help_text for code in Code if code != Code.BUG)


def test_an_extra_is_named_in_full() -> None:
    assert "needs dtrain[plot]" in shown("bench")
