"""What `dtrain launch` prints is what it says: read by bash, by a YAML reader, and field by field."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.specs.build import BASE
from typer.testing import CliRunner

from dtrain.cli.commands import app

TARGETS = {
    "slurm": ("--to", "slurm", "--time", "1:00:00", "--partition", "gpu", "--gpus-per-node", "2"),
    "k8s": ("--to", "k8s", "--image", "registry/dtrain:1", "--claim", "runs:/data"),
    "ssh": ("--to", "ssh", "--hostfile", "my hosts"),
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    path = folder / "job.yaml"
    path.write_text(BASE.replace("name: t", "name: Tiny_Run.1"))
    return path


def launch(spec: Path, *words: str) -> str:
    ended = CliRunner().invoke(app, ["launch", str(spec), *words])
    assert ended.exit_code == 0, ended.output
    return str(ended.stdout)


def refused(spec: Path, *words: str) -> str:
    ended = CliRunner().invoke(app, ["launch", str(spec), *words])
    assert ended.exit_code == 2
    return str(ended.output)


@pytest.mark.parametrize("target", ["slurm", "ssh"])
def test_the_scripts_are_shell_whatever_the_names_are(spec: Path, target: str) -> None:
    script = launch(spec, *TARGETS[target], "output_dir=a 'b'")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_batch_script_asks_for_one_task_a_node_and_goes_back_into_the_queue(spec: Path) -> None:
    script = launch(spec, *TARGETS["slurm"])
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    assert options == {
        "job-name": "tiny-run-1", "nodes": "2", "ntasks-per-node": "1", "exclusive": "", "gpus-per-node": "2",
        "time": "1:00:00", "partition": "gpu", "requeue": "", "open-mode": "append", "output": "%x-%j.log",
        "signal": "USR1@120",
    }  # fmt: skip
    assert "#SBATCH --cpus-per-task=8" in launch(spec, "--to", "slurm", "--cpus-per-node", "8")
    assert "srun --ntasks-per-node=1 --cpus-per-task=8" in launch(spec, "--to", "slurm", "--cpus-per-node", "8")


def test_an_elastic_number_of_nodes_stays_elastic(spec: Path) -> None:
    script = launch(spec, "--to", "slurm", "--nodes", "1:2")
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --no-kill\n" in script
    assert script.count(" --nodes 1:2\n") == 1
    assert "--nodes 1:2 --rendezvous" in launch(spec, *TARGETS["k8s"], "--nodes", "1:2")


@pytest.mark.parametrize(
    ("code", "cancelled", "requeued"), [(75, False, True), (75, True, False), (0, False, False), (70, False, False)]
)
def test_a_batch_script_ends_as_its_nodes_and_is_requeued_after_75(
    spec: Path, tmp_path: Path, code: int, cancelled: bool, requeued: bool
) -> None:
    """With a `srun` and a `scontrol` that write down how they were called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stop = 'kill -TERM "$PPID"\n' if cancelled else ""
    for name, end in (("srun", f"{stop}exit {code}"), ("scontrol", "exit 0")):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@"\n{end}\n')
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    ended = subprocess.run(
        ["bash"], input=launch(spec, "--to", "slurm", "max_steps=9"), env=environment, text=True,
        capture_output=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, "")
    first, *rest = ended.stdout.splitlines()
    assert first.endswith(f" run --or-resume {spec} max_steps=9 --nodes 3")
    assert rest == (["scontrol requeue 7"] if requeued else [])


def test_the_objects_of_kubernetes_fit_together(spec: Path) -> None:
    config, service, job = _objects(launch(spec, *TARGETS["k8s"], "--gpus-per-node", "2", "--port", "1234"))
    assert [(one["apiVersion"], one["kind"]) for one in (config, service, job)] == [
        ("v1", "ConfigMap"), ("v1", "Service"), ("batch/v1", "Job"),
    ]  # fmt: skip
    assert config["data"]["spec.yaml"] == spec.read_text()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "tiny-run-1"
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert "--nodes 2 --rendezvous tiny-run-1-0.tiny-run-1:1234" in container["command"][2]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"spec": "/etc/dtrain", "snapshots": "/dev/shm", "runs": "/data"}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_what_ended_well_or_was_evicted_does_not_count_as_a_failure(spec: Path) -> None:
    _, _, job = _objects(launch(spec, *TARGETS["k8s"]))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {75: "Ignore", 2: "FailJob", 65: "FailJob", 70: "FailJob", 78: "FailJob"}
    assert all(rule["onExitCodes"]["operator"] == "In" for rule in rules if "onExitCodes" in rule)
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules


def test_a_pods_memory_has_room_for_the_snapshots(spec: Path) -> None:
    volumes = _objects(launch(spec, *TARGETS["k8s"]))[2]["spec"]["template"]["spec"]["volumes"]
    (memory,) = [volume["emptyDir"] for volume in volumes if "emptyDir" in volume]
    assert memory["medium"] == "Memory"
    planned = CliRunner().invoke(app, ["plan", str(spec), "--json"])
    slots = yaml.safe_load(planned.stdout)["memory"]["slot_bytes_per_node"]
    assert slots < int(memory["sizeLimit"].removesuffix("Mi")) * 2**20 < slots + 200 * 2**20


def test_what_is_missing_or_for_another_target_is_said(spec: Path) -> None:
    assert "--image IMAGE" in refused(spec, "--to", "k8s")
    assert "--claim NAME[:PATH]" in refused(spec, "--to", "k8s", "--image", "x")
    assert "--image is not for --to ssh, which takes --hostfile, --port" in refused(spec, "--to", "ssh", "--image", "x")
    assert "--claim" not in launch(spec, "--to", "k8s", "--image", "x", "tiers=[{type: memory}]")


def test_a_script_can_be_written_to_a_file(spec: Path, tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    assert launch(spec, *TARGETS["ssh"], "--output", str(file)) == ""
    assert file.read_text() == launch(spec, *TARGETS["ssh"])
    assert file.stat().st_mode & 0o111


def _objects(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))
