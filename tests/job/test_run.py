"""What a person does with a run: start it, stop it, start it twice, resume it, look at it."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.job.dtrain import STEPS, Job, assert_same, document, finish, wait, wait_for_step

from dtrain.tiers.faults import fail_at

METRICS = {
    "step", "loss", "lr", "grad_norm", "step_s", "forward_s", "backward_s", "optimizer_s", "stall_s",
    "snapshot_bytes", "tokens", "tokens_per_s", "attempt", "time",
}  # fmt: skip


def test_files_and_lines_are_as_the_contract_says(oracle: Job) -> None:
    lines = [json.loads(line) for line in oracle.run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line.keys() >= METRICS for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["snapshot_bytes"] > 0 for line in lines[1:])
    assert (lines[-1]["samples"], lines[-1]["tokens_seen"]) == (STEPS * 16, STEPS * 16 * 32)
    assert {"planned", "attempt", "committed", "finished"} <= {
        json.loads(line)["event"] for line in oracle.run.events.read_text().splitlines()
    }
    names = sorted(path.name for path in (oracle.run.root / "checkpoints").iterdir())
    assert names == ["step-0000000006.a0001", "step-0000000009.a0001", "step-0000000012.a0001"]
    assert (oracle.run.root / "logs/attempt-0001/rank-00001.log").is_file()
    committed = [e["step"] for e in oracle.events("committed") if e["tier"] == "memory"]
    assert committed == list(range(1, STEPS + 1))


def test_the_plan_is_kept(oracle: Job) -> None:
    plan = json.loads(oracle.run.plan.read_text())
    windows = [plan["forward"], plan["backward"]]
    assert sum(w["windows"] * w["bytes_per_window"] for w in windows) >= plan["model"]["state_bytes_per_rank"]


def test_inspect_ls_verify(oracle: Job) -> None:
    inspected = document(oracle.do("inspect", "run", "--json"))
    assert inspected["state_digest"] == oracle.digest()
    assert inspected["step"] == STEPS
    listed = document(oracle.do("ls", "run", "--json"))
    assert [c["step"] for c in listed["checkpoints"]] == [12, 9, 6]
    assert oracle.do("verify", "run").code == 0


def test_row_104_a_finished_run_says_so_and_fewer_steps_than_done_are_refused(oracle: Job) -> None:
    ended = oracle.do("resume", "--from", "latest", "run")
    assert ended.code == 0
    assert f"already complete at step {STEPS}" in ended.said
    fewer = oracle.do("resume", "run", "max_steps=5")
    assert fewer.code == 78
    assert "max_steps is 5" in fewer.said


def test_row_18_a_used_folder_is_refused(oracle: Job) -> None:
    ended = oracle.do("run", "spec.yaml")
    assert ended.code == 78
    assert "dtrain resume" in ended.said


def test_without_tiers_the_losses_are_the_same_and_json_is_one_document(job: Job, oracle: Job) -> None:
    ended = job.do("run", "spec.yaml", "tiers=[]", "--json")
    assert ended.code == 0, ended.said
    told = document(ended)
    assert (told["status"], told["tokens_seen"]) == ("finished", STEPS * 16 * 32)
    assert "step" in ended.err
    assert job.losses() == oracle.losses()
    assert job.digest() == oracle.digest()
    assert not (job.run.root / "checkpoints").exists()
    job.assert_nothing_left()


@pytest.mark.parametrize("whom", ["launcher", "worker", pytest.param("group", marks=pytest.mark.campaign)])
def test_row_97_sigterm_saves_and_ends_with_75(whom: str, job: Job, oracle: Job) -> None:
    slow = ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(2, STEPS + 1))
    process = job.start("run", "spec.yaml", fault=slow)
    wait_for_step(job, 3)
    started = time.monotonic()
    if whom == "launcher":
        process.terminate()
    elif whom == "worker":
        job.workers()[1].terminate()
    else:
        for one in job.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.terminate()
    ended = finish(process)
    assert ended.code == 75, ended.said
    assert time.monotonic() - started < 25
    (preempted,) = job.events("preempted")
    assert preempted["tier"] == "disk"
    assert preempted["step"] == max(job.losses()), "no step is lost"
    job.assert_nothing_left()
    again = job.do("resume", "--from", "latest", "run")
    assert again.code == 0, again.said
    assert len(job.run.metrics.read_text().splitlines()) == STEPS, "no step was repeated"
    assert_same(job, oracle)
    job.assert_nothing_left()


@pytest.mark.parametrize("moment", ["start-up", "training"])
def test_row_93_ctrl_c_ends_within_two_seconds(moment: str, job: Job) -> None:
    process = job.start("run", "spec.yaml", "max_steps=100000")
    if moment == "training":
        wait_for_step(job, 5)
    else:
        wait(job.workers, 30, "the workers")
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    ended = finish(process)
    assert time.monotonic() - started < 2
    assert ended.code == 130, ended.said
    assert "Traceback" not in ended.said
    wait(lambda: not job.processes(), 2, "everything to end")
    if moment == "training":
        again = job.do("resume", "run", f"max_steps={max(job.losses()) + 2}")
        assert again.code == 0, again.said


def test_row_102_a_second_process_is_refused(job: Job) -> None:
    process = job.start("run", "spec.yaml", "max_steps=100000")
    wait_for_step(job, 1)
    for words in (("run", "spec.yaml"), ("resume", "run")):
        second = job.do(*words)
        assert second.code == 69, second.said
        assert f"process {process.pid} on" in second.said
        assert second.seconds < 4
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130


def test_row_46_nothing_to_resume_from_is_no_fresh_start(job: Job) -> None:
    ended = job.do("resume", "--from", "latest", "spec.yaml")
    assert ended.code == 65
    assert "nothing to resume from" in ended.said
    assert not job.run.metrics.exists()


def test_row_46_memory_only_and_memory_lost(job: Job) -> None:
    from dtrain.tiers.memory.slots import memory_dir

    process = job.start("run", "spec.yaml", "max_steps=100000", "tiers=[{type: memory, every: 1}]")
    wait_for_step(job, 4)
    job.kill_all()
    finish(process)
    memory_dir(job.run).remove()
    ended = job.do("resume", "run")
    assert ended.code == 65
    assert "nothing to resume from" in ended.said


def test_row_4_damaged_checkpoints_are_passed_over_and_told(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    folders = sorted((job.run.root / "checkpoints").iterdir())
    (folders[-1] / "manifest.json").write_bytes(b"")
    data = bytearray((folders[-2] / "rank-00000.safetensors").read_bytes())
    data[-100] ^= 1
    (folders[-2] / "rank-00000.safetensors").write_bytes(data)
    assert job.do("verify", "run").code == 65
    ended = job.do("resume", "--from", "latest", "run")
    assert ended.code == 0, ended.said
    (restored,) = job.events("restored")
    assert restored["step"] == 6
    assert sorted(skip["step"] for skip in restored["skipped"]) == [9, 12]
    assert_same(job, oracle)


def test_all_checkpoints_damaged_is_65_and_nothing_is_trained(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    for file in (job.run.root / "checkpoints").glob("*/rank-00001.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    ended = job.do("resume", "run", "max_steps=20")
    assert ended.code == 65, ended.said
    assert len(job.losses()) == STEPS
    assert "Traceback" not in ended.said


def test_an_earlier_step_can_be_chosen(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    ended = job.do("resume", "--from", "9", "run")
    assert ended.code == 0, ended.said
    assert job.events("restored")[0]["step"] == 9
    assert_same(job, oracle)
    path = job.run.root / "checkpoints" / "step-0000000009.a0001"
    missing = job.do("resume", "--from", "7", "run")
    assert missing.code == 65
    assert "there is: step 9" in missing.said
    assert path.exists() or missing.code == 65


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.campaign)])
def test_another_world_size_continues_the_same_state(world: int, job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    ended = job.do(
        "resume", "--from", "9", "run", f"cluster.workers_per_node={world}", f"strategy.dp_replicate={world}"
    )
    assert ended.code == 0, ended.said
    (restored,) = job.events("restored")
    assert restored["state_digest"] == document(oracle.do("inspect", "run@9", "--json"))["state_digest"]
    before, after = oracle.losses(), job.losses()
    assert after[10] == pytest.approx(before[10], rel=0.05)  # dropout draws differ, the samples do not


def test_a_model_of_another_shape_is_refused_with_the_difference(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    ended = job.do("resume", "--from", "9", "run", "model.d_ff=64")
    assert ended.code == 78, ended.said
    assert "layers.0.mlp.up.weight" in ended.said
    assert "Traceback" not in ended.said


def test_two_runs_never_share_a_disk_tier(job: Job, tmp_path: Path) -> None:
    shared = f"tiers=[{{type: memory}}, {{type: disk, path: {tmp_path / 'shared'}, every: 3}}]"
    process = job.start("run", "spec.yaml", shared, "max_steps=100000")
    wait_for_step(job, 4)
    other = Job(tmp_path / "other")
    other.write_spec()
    second = other.do("run", "spec.yaml", shared)
    assert second.code in (69, 78), second.said
    assert str(tmp_path / "shared") in second.said
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    later = other.do("run", "spec.yaml", shared)
    assert later.code == 78, later.said
    assert "of another run" in later.said
    assert not other.losses()


def test_a_run_inside_its_own_data_is_refused(job: Job) -> None:
    ended = job.do("run", "spec.yaml", f"dataset.path={job.folder}")
    assert ended.code == 78
    assert "lies inside dataset.path" in ended.said


def test_changed_data_are_refused_unless_named_anew(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    corpus = oracle.folder / "corpus.txt"
    before = corpus.read_bytes()
    try:
        corpus.write_bytes(before + b"one more line\n")
        ended = job.do("resume", "--from", "9", "run")
        assert ended.code == 78, ended.said
        assert "the data have changed" in ended.said
        ended = job.do("resume", "--from", "9", "run", f"dataset.path={job.folder / 'corpus.txt'}")
        assert ended.code == 0, ended.said
        assert "changed: dataset.path" in ended.said
    finally:
        corpus.write_bytes(before)


def test_a_lost_run_json_is_made_anew_from_the_checkpoints(job: Job, oracle: Job) -> None:
    shutil.copytree(oracle.run.root, job.run.root)
    job.run.run.unlink()
    job.run.lock.unlink()
    with job.run.metrics.open("a") as file:
        file.write('{"step": 13, "lo')
    ended = job.do("resume", "run", "max_steps=14")
    assert ended.code == 0, ended.said
    assert job.events("restored")[0]["step"] == STEPS
    assert max(job.losses()) == 14


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign), signal.SIGHUP]
)
def test_a_signal_before_the_first_step_says_so(number: signal.Signals, job: Job) -> None:
    process = job.start("run", "spec.yaml")
    time.sleep(0.6)
    process.send_signal(number)
    ended = finish(process)
    assert ended.code == 130, ended.said
    assert f"stopped by {number.name} before the first step" in ended.err
    assert "Traceback" not in ended.said
    wait(lambda: not job.processes(), 5, "everything to end")


def test_row_25_a_full_disk_is_told_and_training_goes_on(job: Job, oracle: Job) -> None:
    """The drainer's copies of shards fail as they do on a full disk."""
    (job.folder / "sitecustomize.py").write_text(
        "import os, errno, sys\n"
        "if 'dtrain.tiers.drain.drainer' in ' '.join(sys.orig_argv):\n"
        "    pwrite = os.pwrite\n"
        "    def full(descriptor, data, *where):\n"
        "        if len(data) > 10000:\n"
        "            raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "        return pwrite(descriptor, data, *where)\n"
        "    os.pwrite, os.sendfile = full, lambda *_: full(0, bytes(20000))\n"
    )
    ended = job.do("run", "spec.yaml", env={"PYTHONPATH": str(job.folder)})
    assert ended.code == 69, ended.said
    assert job.losses() == oracle.losses()
    assert "No space left on device" in ended.said, ended.said
    assert "needed" in ended.said
    assert not list((job.run.root / "checkpoints").iterdir()), "no temporary file is left"
    (job.folder / "sitecustomize.py").unlink()
    again = job.do("resume", "run")
    assert again.code == 0, again.said
    assert job.digest() == oracle.digest()
    job.assert_nothing_left()
