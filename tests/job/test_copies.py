"""Two copies of one run (`cp -r`) and one place for checkpoints, as a person does it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import STEPS, Job, cleaned, document, finish, wait, wait_for_step
from tests.job.test_storage import slowed

from dtrain.tiers.fence import claim
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.stores.store import Place, open_store


@pytest.fixture
def shared(job: Job) -> Iterator[Path]:
    """A place outside the run's folder."""
    yield job.folder / "shared"


def tiers(shared: Path) -> str:
    return f"tiers=[{{type: memory}}, {{type: disk, path: '{shared}', every: 3, keep: 9}}]"


def test_the_copy_is_refused_until_the_person_says_which_goes_on(job: Job, shared: Path) -> None:
    ended = job.do("run", "spec.yaml", tiers(shared), "max_steps=3")
    assert ended.code == 0, ended.said
    assert not (shared / ".fence").exists()
    copy = Job(job.folder / "copied")
    copy.folder.mkdir()
    shutil.copytree(job.run.root, copy.run.root)
    with cleaned(copy):
        for command in (("resume", "--from", "latest", "run", "max_steps=12"), ("prune", "run", "--keep", "1")):
            refused = copy.do(*command)
            assert refused.code in (69, 78), refused.said
            assert str(job.run.root) in refused.err + refused.out
            assert "is a copy of it" in " ".join(refused.said.split())
        assert [path.name for path in shared.iterdir()] == ["step-0000000003.a0001"]
        ended = job.do("resume", "--from", "latest", "run", "max_steps=6")
        assert ended.code == 0, ended.said
        job.run.root.rename(job.folder / "put away")
        ended = copy.do("resume", "--from", "latest", "run", "max_steps=12")
        assert ended.code == 0, ended.said
        made = [
            json.loads(path.read_bytes())["made_by"]["output_dir"] for path in sorted(shared.glob("*/manifest.json"))
        ]
        assert set(made) == {str(job.run.root), str(copy.run.root)}
        (job.folder / "put away").rename(job.run.root)
        refused = job.do("resume", "--from", "latest", "run", f"max_steps={STEPS + 3}")
        assert refused.code == 78
        assert "is a copy of it" in " ".join(refused.said.split())


@pytest.mark.parametrize("another", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_a_run_whose_tier_was_taken_over_never_ends_as_if_all_was_well(job: Job, shared: Path, another: bool) -> None:
    both = tiers(shared)
    if another:
        both = both[:-1] + f", {{type: object, url: 'file://{job.run.root}/object', every: 3}}]"
    process = job.start("run", "spec.yaml", both, "--json", fault=";".join(slowed(*range(4, STEPS))))
    wait_for_step(job, 4)
    wait(lambda: (shared / ".fence").is_dir() and job.events("committed"), 30, "the first checkpoint")
    run_id = json.loads(job.run.run.read_bytes())["run_id"]
    claim(open_store(Place("disk", str(shared))), run_id, RunDir(Path("/on/another/host")).root)
    ended = finish(process)
    assert ended.code == 69, ended.said
    (fault,) = job.events("fault")
    assert (fault["kind"], fault["tier"]) == ("taken", "disk")
    told = document(ended)
    assert told["exit_code"] == 69
    assert told["status"] == ("finished" if another else "failed")
    for words in ("taken over by process", "/on/another/host"):
        assert words in told["message"]
        assert words in " ".join(ended.err.split())
    assert bool(job.events("finished")) == another
