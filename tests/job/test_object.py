"""Whole runs with an object tier, on a bucket of this machine."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from tests.job.dtrain import STEPS, Job, assert_same, finish, slow, wait
from tests.tiers.s3 import BUCKET, ENVIRONMENT, SECRETS, call, keys, serving

from dtrain.tiers.memory.slots import memory_dir

WITH_DISK = "{{type: memory}}, {{type: disk, every: 3, keep: 3}}, {{type: object, every: 3, keep: 2, {where}}}"
ALONE = "{{type: memory}}, {{type: object, every: 3, keep: 2, {where}}}"


def steps_of(endpoint: str, prefix: str) -> list[str]:
    """Folders with a manifest in the bucket; there must be nothing else."""
    there = keys(endpoint, prefix)
    folders = sorted(key.partition("/")[0] for key in there if key.endswith("/manifest.json"))
    assert {key.partition("/")[0] for key in there} == set(folders)
    return folders


def tiers(form: str, endpoint: str, prefix: str) -> str:
    where = f'url: "s3://{BUCKET}/{prefix}", endpoint: "{endpoint}"'
    return f"tiers=[{form.format(where=where)}]"


@pytest.fixture
def job(job: Job) -> Iterator[Job]:
    job.extra.update(ENVIRONMENT)
    yield job


def committed(job: Job, tier: str) -> list[int]:
    return [event["step"] for event in job.events("committed") if event["tier"] == tier]


def assert_no_secret(job: Job, endpoint: str, prefix: str, *said: str) -> None:
    """Nothing in the run's folder, in the bucket, or on the screen holds a credential."""
    texts = [path.read_bytes() for path in job.folder.rglob("*") if path.is_file()]
    texts += [call(endpoint, "GET", f"{BUCKET}/{prefix}/{key}") for key in keys(endpoint, prefix)]
    texts += [text.encode() for text in said]
    assert len(texts) > 10
    assert not [secret for secret in SECRETS if any(secret.encode() in text for text in texts)]


def assert_outage_told_once(job: Job, endpoint: str) -> None:
    """One event begins the outage and names address and cause; what follows only counts on."""
    told = [
        event for event in job.events("skipped") if event["left_out"] == 1 and "Connection refused" in event["reason"]
    ]
    assert len(told) == 1
    assert endpoint in told[0]["reason"]
    assert not job.events("fault")


def test_row_60_a_run_survives_the_loss_of_the_cluster(job: Job, oracle: Job) -> None:
    with serving() as endpoint:
        prefix = "lost"
        process = job.start("run", "spec.yaml", tiers(WITH_DISK, endpoint, prefix), fault=slow(7, STEPS))
        wait(lambda: 6 in committed(job, "object"), 60, "step 6 in the bucket")
        job.kill_all()
        before = finish(process)
        memory_dir(job.run).remove()
        shutil.rmtree(job.run.root)
        again = job.do("run", "spec.yaml", tiers(WITH_DISK, endpoint, prefix))
        assert again.code == 78, again.said
        assert "dtrain resume" in again.said
        assert not job.run.run.exists(), "a refused run must not name the folder"
        after = job.do("resume", "spec.yaml", tiers(WITH_DISK, endpoint, prefix))
        assert after.code == 0, after.said
        restored = job.events("restored")[-1]
        assert restored["tier"] == "object"
        assert restored["step"] >= 6
        assert job.digest() == oracle.digest()
        assert job.losses() == {step: loss for step, loss in oracle.losses().items() if step > restored["step"]}
        assert steps_of(endpoint, prefix) == ["step-0000000009.a0002", "step-0000000012.a0002"]
        assert not job.run.spool.exists()
        assert_no_secret(job, endpoint, prefix, before.said, after.said)
        job.assert_nothing_left()


def test_a_store_that_goes_away_does_not_stop_training_and_the_end_says_what_is_not_there(
    job: Job, oracle: Job
) -> None:
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(serving())
        process = job.start("run", "spec.yaml", tiers(WITH_DISK, endpoint, "away"), fault=slow(4, 6))
        wait(lambda: 3 in committed(job, "object"), 60, "step 3 in the bucket")
        stack.close()
        ended = finish(process)
    assert ended.code == 0, ended.said
    assert job.digest() == oracle.digest()
    assert job.losses() == oracle.losses()
    assert committed(job, "disk")[-1] == STEPS
    assert committed(job, "object") == [3]
    assert_outage_told_once(job, endpoint)
    (last,) = (line.split() for line in ended.said.splitlines() if line.split()[:1] == ["object"])
    assert last[1:3] == ["step", "3"], "the end says how far the store is"
    assert "checkpoints left out" in ended.said, "and that it has not got all"
    job.assert_nothing_left()


@pytest.mark.campaign
def test_without_a_disk_what_the_store_has_not_got_stays_in_memory_until_it_is_back(job: Job, oracle: Job) -> None:
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(serving())
        process = job.start("run", "spec.yaml", tiers(ALONE, endpoint, "alone"), fault=slow(4, 6))
        wait(lambda: 3 in committed(job, "object"), 60, "step 3 in the bucket")
        stack.close()
        ended = finish(process)
    assert ended.code == 69, ended.said
    assert "the last checkpoint could not be written to object; it is still in memory" in ended.said
    assert_outage_told_once(job, endpoint)
    with serving(port=int(endpoint.rpartition(":")[2])):
        again = job.do("resume", "run")
        assert again.code == 0, again.said
        assert_same(job, oracle)
        assert steps_of(endpoint, "alone") == ["step-0000000003.a0001", "step-0000000012.a0001"]
        job.assert_nothing_left()
