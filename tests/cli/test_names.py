"""Names that are not ASCII, in a locale that has no others: they are what they are, in folders, specs and overrides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "from dtrain.cli.main import main; main()"
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def do(folder: Path, *words: str, **more: str) -> tuple[int, bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONIOENCODING"}
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        cwd=folder, env={**environment, **BARE, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False, timeout=60,
    )  # fmt: skip
    return ended.returncode, ended.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "größe"
    folder.mkdir()
    return folder


def test_a_spec_in_a_folder_and_for_a_folder_of_any_name(folder: Path) -> None:
    code, said = do(folder.parent, "init", str(folder))
    assert code == 0, said
    wanted = folder / "läufe"
    code, said = do(folder, "validate", str(folder / "spec.yaml"), f"output_dir={wanted}", "--json")
    assert code == 0, said
    assert json.loads(said)["spec"]["output_dir"] == str(wanted)
    code, said = do(folder, "resume", str(folder / "spec.yaml"), f"output_dir={wanted}")
    assert (code, b"Traceback" in said) == (65, False), said


def test_what_is_printed_is_what_the_terminal_reads(folder: Path) -> None:
    code, said = do(folder, "ls", str(folder / "läufe"))
    assert code == 2
    assert b"gr\\xf6\\xdfe/l\\xe4ufe" in said
    said.decode("ascii")
    code, said = do(folder, "ls", str(folder / "läufe"), PYTHONIOENCODING="utf-8")
    assert "größe/läufe" in said.decode()
