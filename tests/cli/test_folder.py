"""A folder that cannot be used is refused with the key that names it and with what would help, by every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.cli.checkpoints import SPEC

from dtrain.tiers.stores.access import unusable, whose

COMMAND = [str(Path(sys.executable).parent / "dtrain")]
PLAIN_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
WITHIN = PLAIN_USER if os.geteuid() == 0 else ()


def said(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code of a command of somebody who cannot pass over permissions, and its only line."""
    environment = {**os.environ, "SLURM_JOB_ID": "", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [*WITHIN, *COMMAND, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return ended.returncode, line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    return tmp_path


TRAINS = {"run": ["run"], "run --or-resume": ["run", "--or-resume"], "resume": ["resume"]}


@pytest.mark.parametrize("name", TRAINS)
def test_a_folder_that_may_not_be_written(folder: Path, name: str) -> None:
    for mode, denied in ((0o555, folder / "run"), (0, folder / "run"), (0o555, folder)):
        if denied != folder:
            denied.mkdir(exist_ok=True)
        denied.chmod(mode)
        try:
            code, line = said(folder, *TRAINS[name], "spec.yaml")
        finally:
            denied.chmod(0o755)
        assert code == 69
        assert line.startswith(f"output_dir {folder / 'run'} cannot be used: {denied} belongs to ")
        assert f"mode {mode:04o}; you are " in line
        remedy = "a run goes on where it is" if name == "resume" else "give another: output_dir=…"
        assert f"; {remedy}" in line
        (folder / "run").rmdir() if denied == folder / "run" and mode == 0 else None


@pytest.mark.parametrize("name", TRAINS)
@pytest.mark.parametrize("kind", ["file", "below a file", "link to nothing", "link to itself", "long name"])
def test_a_path_that_cannot_be_a_folder_is_a_fault_of_the_spec(folder: Path, name: str, kind: str) -> None:
    place = folder / "run"
    if kind.startswith("link"):
        place.symlink_to(folder / ("run" if "itself" in kind else "nowhere/at/all"))
    elif "file" in kind:
        place.write_text("a person's own")
    wanted = {"below a file": "run/x", "long name": "x" * 300}.get(kind, "run")
    code, line = said(folder, *TRAINS[name], "spec.yaml", f"output_dir={wanted}")
    if kind == "link to nothing" and name == "resume":
        assert code == 65  # nothing is there: nothing to go on from
        return
    assert code == 78, line
    assert line.startswith(f"output_dir {folder / wanted} cannot be used: ")
    assert "file" not in kind or place.read_text() == "a person's own"


@pytest.mark.parametrize("words", [["ls"], ["inspect"], ["verify"], ["prune"], ["resume"]])
def test_who_may_not_look_into_a_run_is_told_whose_it_is(folder: Path, words: list[str]) -> None:
    (folder / "run").mkdir(mode=0)
    code, line = said(folder, *words, "run")
    (folder / "run").chmod(0o755)
    assert code == 69
    assert f"Permission denied ({folder / 'run'} belongs to " in line


def test_the_nearest_folder_that_is_there_is_judged(tmp_path: Path) -> None:
    assert unusable(tmp_path / "a" / "b") is None
    (tmp_path / "file").write_text("")
    assert unusable(tmp_path / "file" / "b") == f"{tmp_path}/file is no folder"
    assert unusable(Path("/proc/1/task/x")) is not None or os.access("/proc/1/task", os.W_OK)
    assert whose(tmp_path / "a").startswith(f"{tmp_path} belongs to ")
