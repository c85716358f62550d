"""The example of docs/strategies.md: a model of one's own, cut by the plan that it names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, cleaned
from tests.job.test_strategies import assert_close, shards_of

from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import read

DOCS = Path(__file__).parents[2] / "docs" / "strategies.md"
CUTS = {
    "tensor and pipeline": ["strategy.tp=2", "strategy.pp=2"],
    "tensor": ["strategy.tp=4", "strategy.pp=1"],
    "tensor and fsdp": ["strategy.tp=2", "strategy.pp=1", "strategy.dp_shard=2"],
    "pipeline and fsdp, interleaved": [
        "strategy.tp=1", "strategy.pp=2", "strategy.dp_shard=2", "strategy.pp_schedule=interleaved-1f1b",
    ],
}  # fmt: skip
USUAL = {"tensor and pipeline"}
TIERS = "tiers=[{type: memory, every: 1}, {type: disk, every: 2}]"


def made(folder: Path) -> Job:
    job = Job(folder)
    job.extra["OMP_NUM_THREADS"] = "1"
    folder.mkdir(parents=True)
    code, spec = (re.findall(rf"```{kind}\n(.*?)```", DOCS.read_text(), re.DOTALL) for kind in ("python", "yaml"))
    (job.folder / "digits.py").write_text(code[0])
    (shown,) = [text for text in spec if "digits" in text]
    job.spec.write_text(shown.replace("runs/digits", str(job.run.root)))
    return job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """The same job twice."""
    first, second = made(tmp_path / "unbroken"), made(tmp_path / "job")
    with cleaned(first), cleaned(second):
        yield first, second


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, float]]:
    """The losses of one worker."""
    job = made(tmp_path_factory.mktemp("alone") / "job")
    with cleaned(job):
        words = ["strategy={}", "cluster.workers_per_node=1", "cluster.device=cpu", "tiers=[]", "max_steps=6"]
        ended = job.do("run", "spec.yaml", *words)
        assert ended.code == 0, ended.said
        yield job.losses()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in USUAL)) for n in CUTS])
def test_killed_and_resumed_it_is_the_unbroken_run_agrees_with_one_worker_and_goes_on_uncut(
    name: str, jobs: tuple[Job, Job], alone: dict[int, float]
) -> None:
    unbroken, job = jobs
    words = [*CUTS[name], "max_steps=5", "cluster.device=cpu", TIERS]
    ended = unbroken.do("run", "spec.yaml", *words)
    assert ended.code == 0, ended.said
    assert_close(unbroken, alone)
    assert shards_of(unbroken) == read(unbroken.run.plan)["model"]["state_bytes_per_rank"]
    ended = job.do("run", "spec.yaml", *words, fault=fail_at(1, 4, "window.backward"))
    assert ended.code == 0, ended.said
    assert_same(job, unbroken)
    back = ["strategy={dp_shard: 2}", "cluster.workers_per_node=2", "max_steps=6"]
    ended = job.do("resume", "--from", "latest", "run", *back)
    assert ended.code == 0, ended.said
    assert job.events("restored")[-1]["state_digest"] == job.events("finished")[0]["state_digest"]
    assert_close(job, alone)
    job.assert_nothing_left()
