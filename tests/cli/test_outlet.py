"""Whatever is behind standard output: no command ends with a traceback, and none says 0 for an answer that was lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.checkpoints import Run

from dtrain.cli.commands import app
from dtrain.tiers.memory.slots import memory_dir

CODE = "import sys\nfrom dtrain.cli.main import main\nsys.argv = ['dtrain', *sys.argv[1:]]\nmain()"
EXAMPLE = str(Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml")
WORDS = {
    "init": ["init", "new"],
    "validate": ["validate", EXAMPLE],
    "plan": ["plan", EXAMPLE],
    "run": ["run", "nowhere.yaml", "--json"],
    "resume": ["resume", "nowhere", "--json"],
    "bench": ["bench", "nowhere.yaml", "--json"],
    "ls": ["ls", "run"],
    "inspect": ["inspect", "run"],
    "verify": ["verify", "run"],
    "prune": ["prune", "run", "--dry-run"],
    "export": ["export", "run", "out"],
    "launch": ["launch", EXAMPLE, "--to", "slurm"],
    "schema": ["schema"],
}
"""A way to call each command that answers on standard output."""
REFUSED = {"run": 78, "resume": 78, "bench": 78}
WITH_JSON = ["validate", "plan", "ls", "inspect", "verify", "prune", "export"]
CALLS = [*WORDS.values(), *([*WORDS[name], "--json"] for name in WITH_JSON), ["--help"], ["--version"]]


def test_every_command_is_called_here() -> None:
    named = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands}
    assert named == set(WORDS), "a new command belongs into WORDS"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("outlet")
    run = Run(made)
    run.store(10)
    assert run.run.root == made / "run"
    yield made
    memory_dir(run.run).remove()


def do(words: list[str], folder: Path, behind: str, errors: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run a command with standard output (and error) `full`, `closed`, or a pipe that nobody reads."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "new", ignore_errors=True)
    redirect = {"full": ">/dev/full", "closed": ">&-", "": ""}
    line = f'exec "$@" {redirect.get(behind, "")} {"2" + redirect[errors] if errors else ""}'
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            ["sh", "-c", line, "sh", sys.executable, "-c", CODE, *words],
            stdin=subprocess.DEVNULL,
            stdout=writing if behind == "pipe" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_full_disk_behind_it_is_one_line_and_69(words: list[str], folder: Path) -> None:
    ended = do(words, folder, "full")
    said = ended.stderr.decode()
    assert ended.returncode == REFUSED.get(words[0], 69), said
    assert said.count("No space left on device: the answer is lost") == 1
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_reader_that_has_left_ends_it_without_a_word(words: list[str], folder: Path) -> None:
    ended = do(words, folder, "pipe")
    assert ended.returncode == REFUSED.get(words[0], -signal.SIGPIPE), ended.stderr
    assert b"Traceback" not in ended.stderr
    assert b"lost" not in ended.stderr
    assert b"Exception ignored" not in ended.stderr


@pytest.mark.parametrize("words", WORDS.values(), ids=" ".join)
def test_one_that_is_closed_is_not_wanted(words: list[str], folder: Path) -> None:
    ended = do(words, folder, "closed")
    assert ended.returncode == REFUSED.get(words[0], 0), ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("errors", ["full", "closed"])
@pytest.mark.parametrize("words", [["ls", "run"], ["ls", "nowhere"], ["nonsense"]], ids=" ".join)
def test_standard_error_may_be_lost_too(words: list[str], errors: str, folder: Path) -> None:
    ended = do(words, folder, "", errors)
    assert ended.returncode == (0 if words == ["ls", "run"] else 2)
    assert bool(ended.stdout) == (words == ["ls", "run"])


def test_names_that_are_no_text_are_shown_and_not_a_traceback(folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    for words in (["init", name], ["ls", name], ["validate", name]):
        ended = do(words, folder, "")
        assert b"Traceback" not in ended.stderr, ended.stderr
        assert b"caf" in ended.stdout + ended.stderr
    shutil.rmtree(folder / name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_moments_is_quiet(number: signal.Signals, folder: Path) -> None:
    """At many moments between the entry point and the end of the imports."""
    held = (  # the import system itself sends the signal, so that no moment depends on the machine's speed
        "import os, signal, sys, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Held(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == os.environ['HELD']:\n"
        "            os.kill(os.getpid(), int(os.environ['NUMBER']))\n"
        "from dtrain.cli.main import main\n"
        "sys.meta_path.insert(0, Held())\n"
        "sys.argv = ['dtrain', 'run', 'nowhere.yaml']\n"
        "main()\n"
    )
    moments = [
        "dtrain.cli.terminal.outlet",
        "dtrain.cli.commands",
        "typer",
        "dtrain.cli.terminal.refusal",
        "dtrain.cli.run",
    ]
    for moment in [*moments, "rich.console", "yaml"]:
        env = {**os.environ, "HELD": moment, "NUMBER": str(int(number))}
        ended = subprocess.run(
            [sys.executable, "-c", held], capture_output=True, cwd=folder, env=env, check=False, timeout=60
        )
        said = ended.stderr.decode()
        assert "Traceback" not in said, (moment, said)
        assert ended.returncode in (130, -number), (moment, said)
        assert said.count("\n") <= 1, (moment, said)
