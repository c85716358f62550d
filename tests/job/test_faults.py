"""A fault at any named point ends in a restart by itself, and the run goes on bit for bit as if nothing had been."""

import pytest
from tests.job.dtrain import STEPS, Job, assert_same, finish, wait, wait_for_step
from tests.job.test_peer import PROCESS

from dtrain.tiers.faults import POINTS, fail_at
from dtrain.tiers.format.jsonfile import read_lines

# Several deaths in one run, an attempt each: point, rank, step. First and middle steps, the step before and after a
# disk checkpoint, the last step.
WORKERS: dict[str, list[tuple[str, int | None, int | None]]] = {
    "before the first step": [("worker.start", 0, None), ("step.start", 0, 1), ("restore.before", 1, None)],
    "around the copy": [("copy.begin", 1, 5), ("copy.slice", 0, 6), ("copy.committed", 0, 8)],
    "in the windows": [("copy.record", 1, 4), ("window.forward", 1, 7), ("window.backward", 0, 9)],
    "around the update, and again while it restores": [
        ("update.before", 1, 9),
        ("restore.before", 1, None),
        ("restore.after", 0, None),
        ("update.after", 0, STEPS),
    ],
}
EVALUATIONS: list[tuple[str, int, int, int]] = [("evaluate.batch", 1, 4, 1), ("evaluate.batch", 0, 8, 12)]
"""Point, rank, step, and the batch of that rank: its first one, and its last, when the copy is whole."""
DRAINER: list[tuple[str, int | None]] = [
    ("drain.begin", 3),
    ("drain.committed", 3),
    ("drain.file", 6),
    ("drain.manifest", 6),
    ("drain.rename", 9),
    ("prune.renamed", None),
]


def test_every_fault_point_has_a_case() -> None:
    cases = {point for deaths in WORKERS.values() for point, _, _ in deaths}
    cases |= {point for point, _ in DRAINER} | {point for point, *_ in EVALUATIONS}
    cases |= {point for point, _ in PROCESS}
    assert cases == POINTS.keys()


@pytest.mark.parametrize("where", WORKERS)
def test_row_49_a_worker_killed_again_and_again(where: str, job: Job, oracle: Job) -> None:
    deaths = WORKERS[where]
    faults = [fail_at(rank, step, point, attempt=1 + at) for at, (point, rank, step) in enumerate(deaths)]
    ended = job.do("run", "spec.yaml", fault=";".join(faults))
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    told = job.events("fault")
    assert [(fault["kind"], fault["rank"]) for fault in told] == [("killed", rank) for _, rank, _ in deaths]
    last = {attempt: step for attempt, (_, _, step) in enumerate(deaths, 1) if step is not None}
    for event in job.events("restored"):
        reached = last.get(event["attempt"] - 1)
        assert reached is None or reached - event["step"] <= 3, "at most two steps are repeated"
    job.assert_nothing_left()


def test_killed_in_evaluations_training_and_evaluations_are_those_of_unbroken_runs(job: Job, oracle: Job) -> None:
    """The oracle has no evaluations: they leave no trace in the training."""
    own = f"{{type: text, path: {job.folder / 'held_out.txt'}, seq_len: 32}}"
    (job.folder / "held_out.txt").write_bytes(b"".join(f"and {n} is held out\n".encode() for n in range(400)))
    block = f"evaluation={{every: 4, batches: 24, dataset: {own}}}"
    assert job.do("run", "spec.yaml", block, f"output_dir={job.folder / 'calm'}").code == 0
    calm = [line for line in read_lines(job.folder / "calm" / "events.jsonl") if line["event"] == "evaluated"]
    deaths = [
        fail_at(rank, step, point, nth=nth, attempt=1 + at) for at, (point, rank, step, nth) in enumerate(EVALUATIONS)
    ]
    slow = fail_at(0, 8, "evaluate.batch", kind="slow", nth=11, attempt=2)
    ended = job.do("run", "spec.yaml", block, fault=";".join([*deaths, slow]))
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    told = job.events("evaluated")
    assert [(e["step"], e["loss"]) for e in told] == [(e["step"], e["loss"]) for e in calm]
    assert [e["step"] for e in told] == [4, 8, STEPS]
    assert [(e["attempt"], e["step"]) for e in job.events("restored")][-1] == (3, 8), "the copy went on meanwhile"
    last = {line["step"]: line for line in read_lines(job.run.metrics)}
    assert {step: line["eval_loss"] for step, line in last.items() if "eval_loss" in line} == {
        e["step"]: e["loss"] for e in told
    }
    job.assert_nothing_left()


def test_the_drainer_killed_again_and_again(job: Job, oracle: Job) -> None:
    faults = [fail_at(None, step, point, attempt=1 + at) for at, (point, step) in enumerate(DRAINER)]
    ended = job.do("run", "spec.yaml", fault=";".join(faults))
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    told = job.events("fault")
    assert len(DRAINER) - 2 <= len(told) <= len(DRAINER), "the last ones may die after the last step"
    assert all(fault["kind"] == "drainer" for fault in told), "training never noticed"
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raise", "exception"),
        pytest.param("exit", "exited", id="row_106_left_with_0_too_early"),
        pytest.param("stop", "hang", id="row_100_stopped"),
    ],
)
def test_other_ways_to_fail(kind: str, told: str, job: Job, oracle: Job) -> None:
    ended = job.do("run", "spec.yaml", fault=fail_at(1, 8, "window.forward", kind=kind))
    assert ended.code == 0, ended.said
    (fault,) = job.events("fault")
    assert (fault["kind"], fault["rank"]) == (told, 1), fault
    assert fault["memory_peak_bytes"] > 50e6, "torch alone takes more"
    assert any("faults.py" in frame for frame in fault["stack"]) == (told == "hang"), fault
    assert_same(job, oracle)
    job.assert_nothing_left()


WHOLE_JOB = [("copy.begin", 4), ("window.forward", 5), ("window.backward", 7), ("update.after", 8), ("copy.record", 10)]


@pytest.mark.parametrize("deaths", [WHOLE_JOB[1::2], pytest.param(WHOLE_JOB, marks=pytest.mark.campaign)])
def test_the_whole_job_killed_and_resumed_again_and_again(deaths: list[tuple[str, int]], job: Job, oracle: Job) -> None:
    command: tuple[str, ...] = ("run", "spec.yaml")
    for attempt, (point, step) in enumerate(deaths, 1):
        process = job.start(*command, fault=fail_at(0, step, point, kind="stop", attempt=attempt))
        wait(job.stopped, 60, f"the fault at {point}")
        job.kill_all()
        finish(process)
        command = ("resume", "--from", "latest", "run")
    ended = job.do(*command)
    assert ended.code == 0, ended.said
    restored = {event["attempt"]: event for event in job.events("restored")}
    for attempt, (point, step) in enumerate(deaths, 2):
        assert restored[attempt]["tier"] == "memory", point
        assert restored[attempt]["step"] >= step - 2, point
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_the_process_that_forks_the_workers_killed(job: Job, oracle: Job) -> None:
    process = job.start("run", "spec.yaml", fault=fail_at(0, 8, "window.forward", kind="stop"))
    wait(job.stopped, 60, "the fault")
    (nursery,) = job.running("dtrain.engine.attempt.nursery")
    nursery.kill()
    ended = finish(process)
    assert ended.code == 0, ended.said
    assert [fault["kind"] for fault in job.events("fault")] == ["killed"]
    assert any("started one by one" in event["detail"] for event in job.events("warning"))
    assert_same(job, oracle)
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "module", ["dtrain.engine.attempt.nursery", pytest.param("standin.py", marks=pytest.mark.campaign)]
)
def test_what_stands_between_launcher_and_workers_is_stopped(module: str, job: Job, oracle: Job) -> None:
    slow = ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(8, STEPS + 1))
    process = job.start("run", "spec.yaml", "cluster.heartbeat_timeout=1s", fault=slow)
    wait_for_step(job, 7)
    job.running(module)[0].suspend()
    ended = finish(process)
    assert ended.code == 0, ended.said
    assert any("stood still: ended" in event["detail"] for event in job.events("warning"))
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_row_1_killed_between_data_and_manifest_the_older_step_is_resumed(job: Job, oracle: Job) -> None:
    """As after a power cut: the memory is gone, the newest checkpoint on disk has no manifest."""
    from dtrain.tiers.memory.slots import memory_dir

    process = job.start("run", "spec.yaml", fault=fail_at(None, 6, "drain.manifest", kind="stop", attempt=None))
    wait_for_step(job, 7)
    wait(job.stopped, 10, "the fault")
    job.kill_all()
    finish(process)
    memory_dir(job.run).remove()
    ended = job.do("resume", "--from", "latest")
    assert ended.code == 2 or "runs" in ended.said  # the run is not under ./runs: it must be named
    ended = job.do("resume", "--from", "latest", "spec.yaml")
    assert ended.code == 0, ended.said
    assert [(e["tier"], e["step"]) for e in job.events("restored")] == [("disk", 3)]
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_only_the_launcher_killed(job: Job, oracle: Job) -> None:
    process = job.start("run", "spec.yaml", "max_steps=2000")
    wait_for_step(job, 20)
    process.kill()
    process.wait()
    wait(lambda: not job.workers(), 3, "the workers to die with their launcher")
    wait(lambda: not job.drainers(), 20, "the drainer to save what there was")
    reached = max(job.losses())
    assert not job.processes()
    newest = max(e["step"] for e in job.events("committed") if e["tier"] == "disk")
    assert newest >= reached - 2
    ended = job.do("resume", "--from", "latest", "run", f"max_steps={reached + 3}")
    assert ended.code == 0, ended.said
    assert job.events("restored")[0]["step"] == newest
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "point",
    [
        "drain.begin",
        pytest.param("drain.manifest", marks=pytest.mark.campaign),
        pytest.param("drain.committed", marks=pytest.mark.campaign),
    ],
)
def test_cut_off_after_the_last_step_resume_brings_it_to_disk(point: str, job: Job, oracle: Job) -> None:
    process = job.start("run", "spec.yaml", fault=fail_at(None, STEPS, point, kind="stop", attempt=None))
    wait(job.stopped, 60, "the fault")
    job.kill_all()
    finish(process)
    ended = job.do("resume", "--from", "latest", "run")
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    assert (job.run.root / "checkpoints" / f"step-{STEPS:010d}.a0001" / "manifest.json").is_file()
    job.assert_nothing_left()
    assert "already complete" in job.do("resume", "run").said


def test_a_drainer_that_stands_still_is_replaced(job: Job, oracle: Job) -> None:
    fault = fail_at(None, 3, "drain.file", kind="stop")
    ended = job.do("run", "spec.yaml", fault=fault)
    assert ended.code == 0, ended.said
    assert any("stood still" in e["detail"] for e in job.events("fault")), job.events("fault")
    assert_same(job, oracle)
    job.assert_nothing_left()


def test_drainers_that_always_die_do_not_stop_training(job: Job, oracle: Job) -> None:
    fault = fail_at(None, 6, "drain.file", attempt=None)
    ended = job.do("run", "spec.yaml", fault=fault)
    assert ended.code == 0, ended.said
    assert_same(job, oracle)
    assert not (job.run.root / "checkpoints" / "step-0000000006.a0001").exists()
    job.assert_nothing_left()


def test_row_38_memory_removed_under_a_live_run(job: Job, oracle: Job) -> None:
    from dtrain.tiers.memory.slots import memory_dir

    slow = ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(4, 9))
    process = job.start("run", "spec.yaml", fault=slow)
    wait(lambda: "disk" in [event["tier"] for event in job.events("committed")], 60, "step 3 on disk")
    memory_dir(job.run).remove()
    ended = finish(process)
    assert ended.code == 0, ended.said
    assert [e["tier"] for e in job.events("restored")] == ["disk"]
    assert_same(job, oracle)
    job.assert_nothing_left()
