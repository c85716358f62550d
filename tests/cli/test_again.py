"""`--or-resume`: begun, never begun, or begun with nothing stored; and what was lost is not begun anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.build import job_spec
from tests.tiers.build import put

from dtrain.cli.again import has_begun
from dtrain.cli.terminal.refusal import Refused
from dtrain.specs.models import Spec
from dtrain.tiers.format.jsonfile import append_event
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.slots import memory_dir, open_memory_dir


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir(tmp_path / "run")
    made.root.mkdir()
    yield made
    memory_dir(made).remove()


@pytest.fixture
def spec(run: RunDir) -> Spec:
    return job_spec(output_dir=str(run.root))


def test_a_run_without_anything_stored_begins(run: RunDir, spec: Spec) -> None:
    assert not has_begun(run, spec)
    append_event(run.events, "attempt", None, 1)
    append_event(run.events, "fault", 0, 1)
    assert not has_begun(run, spec), "cut off before its first checkpoint"


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(run: RunDir, spec: Spec) -> None:
    append_event(run.events, "committed", 3, 1, tier="disk")
    assert has_begun(run, spec)


def test_a_snapshot_in_memory_is_something_to_go_on_from(run: RunDir, spec: Spec) -> None:
    memory = open_memory_dir(run, "r")
    assert not has_begun(run, spec)
    put(memory, 0, 1, 0, 4)
    assert has_begun(run, spec)


def test_a_tier_that_cannot_be_asked_is_a_refusal(run: RunDir, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("out of reach")

    monkeypatch.setattr("dtrain.cli.again.holdings", fail)
    with pytest.raises(Refused, match="cannot be asked whether the run has begun: out of reach"):
        has_begun(run, spec)
