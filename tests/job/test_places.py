"""Where a run lives, and what its user may do there: odd names, no place for temporary files, rights that go away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import SPEC, STEPS, Job, assert_same, cleaned, finish, wait

from dtrain.tiers.faults import fail_at
from dtrain.tiers.memory.slots import memory_dir

PLAIN_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
"""Root without its power to pass over permissions: what may not be written is not written."""
WITHIN = PLAIN_USER if os.geteuid() == 0 else ()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Job]:
    """A run in a folder whose path has blanks, a line's end, letters of other scripts, quotes, and 200 more bytes."""
    made = Job(tmp_path / "a b\n'ü\" $HOME" / ("x" * 200))
    made.write_spec()
    made.spec.write_text(SPEC.format(output_dir="run", text="corpus.txt", steps=STEPS))
    with cleaned(made):
        yield made


def test_row_39_neither_long_odd_paths_nor_a_missing_place_for_temporary_files_matter(far: Job, oracle: Job) -> None:
    """Sockets have no path, logs and temporary files lie in the run's folder; a restart needs no more than a start."""
    surroundings = {
        "TMPDIR": str(far.folder / ("y" * 120)), "HOME": "/nowhere", "LANG": "C", "LC_ALL": "C", "TERM": "dumb",
        "COLUMNS": "40",
    }  # fmt: skip
    process = far.start("run", "spec.yaml", fault=fail_at(1, 5, "window.forward"), env=surroundings, within=WITHIN)
    ended = finish(process)
    assert ended.code == 0, ended.said
    assert [fault["kind"] for fault in far.events("fault")] == ["killed"]
    assert_same(far, oracle)
    far.assert_nothing_left()
    assert {path.name for path in far.folder.iterdir()} == {"spec.yaml", "corpus.txt", "run"}


def test_row_26_a_tier_that_may_no_longer_be_written_is_told_and_the_run_does_not_end_as_if_all_was_well(
    job: Job, oracle: Job
) -> None:
    slowed = ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(4, 8))
    process = job.start("run", "spec.yaml", fault=slowed, within=WITHIN)
    folder = job.run.root / "checkpoints"
    wait((folder / "step-0000000003.a0001" / "manifest.json").exists, 60, "step 3 on disk")
    folder.chmod(0o555)
    ended = finish(process)
    assert ended.code == 69, ended.said
    reasons = {event["step"]: event["reason"] for event in job.events("skipped")}
    assert "Permission denied" in reasons[6], reasons
    assert STEPS in reasons
    assert job.losses() == oracle.losses(), "training went on"
    assert max(memory_dir(job.run).whole()).step == STEPS
    refused = finish(job.start("resume", "run", within=WITHIN))
    assert refused.code == 69, refused.said
    assert f"{folder} cannot be used: {folder} belongs to" in refused.said
    folder.chmod(0o755)
    again = finish(job.start("resume", "run", within=WITHIN))
    assert again.code == 0, again.said
    assert job.digest() == oracle.digest()
    job.assert_nothing_left()
