"""`resume` of a run with another `output_dir`: a run goes on where it is, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.checkpoints import Run, dtrain


def test_a_run_goes_on_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtrain.cli.commands.stop_at_once", lambda _: None)  # it takes the signals of this process
    run = Run(tmp_path)
    run.store(10)
    ended = dtrain("resume", run.run.root, "output_dir=other")
    assert ended.code == 2
    assert f"output_dir=other: a run goes on in its own folder, {run.run.root}" in ended.err
    assert not (tmp_path / "other").exists()
    same = dtrain("resume", run.run.root, f"output_dir={run.run.root}", "max_steps=5")
    assert "its own folder" not in same.err
    assert same.code != 2
