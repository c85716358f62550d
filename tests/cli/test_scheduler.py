"""Which node this is, from what Slurm, torchrun's variables or Kubernetes say; the command line and the spec win."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console
from tests.specs.build import BASE

from dtrain.cli.node import place_of_this
from dtrain.cli.scheduler import FIRST_PORT, PORTS, hosts, meeting_point, surroundings, tell_place
from dtrain.cli.terminal.refusal import Refused
from dtrain.specs.load import load_spec

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NODEID": "2", "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "node[08-11]", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "node[08-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
TORCHRUN = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "23456"}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29400"}
UNSAID = BASE.replace("nodes: 2, workers_per_node: 2", "workers_per_node: 1")
FOUR = BASE.replace("nodes: 2, workers_per_node: 2", "nodes: 4, workers_per_node: 1")


class Task:
    """A process that was started with these variables and nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.path = patch, folder / "job.yaml"

    def place(self, environ: dict[str, str], text: str = UNSAID, *words: str, rank: int | None = None) -> int:
        for name in os.environ:
            if name.startswith(("SLURM_", "PET_", "MASTER_", "JOB_COMPLETION")):
                self.patch.delenv(name)
        for name, value in environ.items():
            self.patch.setenv(name, value)
        self.path.write_text(text)
        around = surroundings()
        self.spec = load_spec(self.path, words, around.fallbacks)
        return place_of_this(self.spec, rank, around)

    def refused(self, environ: dict[str, str], text: str = UNSAID, *words: str, rank: int | None = None) -> str:
        with pytest.raises(Refused) as caught:
            self.place(environ, text, *words, rank=rank)
        return str(caught.value)

    def told(self, node: int) -> str:
        console = Console(record=True, width=200)
        tell_place(self.spec, node, surroundings(), console)
        return console.export_text()


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Task:
    return Task(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("one", ["one"]),
        ("node[01-03,7],b", ["node01", "node02", "node03", "node7", "b"]),
        ("a,b[9-11]", ["a", "b9", "b10", "b11"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("gpu-[099-101]-ib.site.org", ["gpu-099-ib.site.org", "gpu-100-ib.site.org", "gpu-101-ib.site.org"]),
        ("", []),
    ],
)
def test_a_nodelist_is_read_as_scontrol_reads_it(nodelist: str, expected: list[str]) -> None:
    assert list(hosts(nodelist)) == expected


def test_a_task_of_slurm_knows_its_place(task: Task) -> None:
    assert task.place(SRUN) == 2
    assert task.spec.cluster.nodes == 4
    assert meeting_point(task.spec) == f"node08:{FIRST_PORT + 4711 % PORTS}"
    assert task.told(2) == f"nodes: 4 by Slurm; this is node 2, they meet at node08:{FIRST_PORT + 4711}\n"
    assert "node08" not in task.spec.model_dump_json(), "a requeued job may be on other nodes"


def test_a_step_on_a_part_of_the_allocation_is_a_job_of_its_own(task: Task) -> None:
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[10-11]"}
    assert task.place({**SRUN, **step, "SLURM_NODEID": "1"}) == 1
    assert task.spec.cluster.nodes == 2
    assert meeting_point(task.spec) == f"node10:{FIRST_PORT + 4714}"


def test_older_names_of_slurm_are_enough(task: Task) -> None:
    old = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "20001"}
    assert task.place(old) == 1
    assert (task.spec.cluster.nodes, meeting_point(task.spec)) == (2, f"a1:{FIRST_PORT + 5001}")


@pytest.mark.parametrize("environ", [SRUN, TORCHRUN, INDEXED], ids=["slurm", "torchrun", "kubernetes"])
def test_the_command_line_and_the_spec_win(task: Task, environ: dict[str, str]) -> None:
    assert task.place(environ, FOUR, "cluster.rendezvous=here:1", rank=3) == 3
    assert meeting_point(task.spec) == "here:1"
    assert task.place(environ, FOUR, "cluster.nodes=8") == 2
    assert task.spec.cluster.nodes == 8
    assert task.place(environ, UNSAID, "cluster.nodes=1", rank=0) == 0


def test_torchruns_variables(task: Task) -> None:
    assert task.place(TORCHRUN) == 2
    assert (task.spec.cluster.nodes, meeting_point(task.spec)) == (4, "first:23456")
    for endpoint, expected in {"n0:4": "n0:4", "n0": "n0:29500", "fd00::1": "[fd00::1]:29500"}.items():
        task.place({**TORCHRUN, "PET_RDZV_ENDPOINT": endpoint})
        assert meeting_point(task.spec) == expected
    assert "PET_RDZV_ENDPOINT" in task.refused({**TORCHRUN, "PET_RDZV_ENDPOINT": "a b"})


def test_a_pod_of_an_indexed_job_has_its_rank(task: Task) -> None:
    assert task.place(INDEXED, FOUR) == 2
    assert meeting_point(task.spec) == "job-0.job:29400"
    assert task.told(2) == "nodes: 4; this is node 2, they meet at job-0.job:29400\n"
    assert task.place(INDEXED, UNSAID) == 0, "an Indexed Job may be many runs on one node each"
    assert "JOB_COMPLETION_INDEX=7 in the environment: the job has 4 nodes" in task.refused(
        {**INDEXED, "JOB_COMPLETION_INDEX": "7"}, FOUR
    )


def test_more_tasks_than_one_on_a_node_are_refused_with_the_remedy(task: Task) -> None:
    for several in ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, {"SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}):
        assert "srun --ntasks-per-node=1" in task.refused({**SRUN, **several})
    alone = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert "starts 8 tasks" in task.refused({**alone, "SLURM_NTASKS_PER_NODE": "8"})
    assert task.place({**SRUN, "SLURM_NTASKS_PER_NODE": "8"}) == 2, "the step itself was started with one"


def test_a_batch_script_is_not_a_node_of_several(task: Task) -> None:
    batch = {**SRUN, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8"}
    del batch["SLURM_STEP_ID"]
    assert "its batch script" in task.refused(batch)
    assert "its batch script" in task.refused(batch, FOUR)
    assert task.place(batch, UNSAID, "cluster.nodes=1") == 0
    assert task.place({**batch, "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1"}) == 0


def test_a_shell_in_an_allocation_is_one_node(task: Task) -> None:
    salloc = {"SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "node[08-11]", "SLURM_NTASKS_PER_NODE": "8"}
    assert task.place(salloc) == 0
    assert task.spec.cluster.nodes == 1


def test_a_node_too_many_and_a_wrong_number_are_named(task: Task) -> None:
    assert "SLURM_NODEID=2 in the environment: the job has 2 nodes" in task.refused(SRUN, BASE)
    assert "SLURM_NODEID=2 in the environment: the job has 1 node" in task.refused(SRUN, UNSAID, "cluster.nodes=1")
    assert "SLURM_NODEID=x" in task.refused({**SRUN, "SLURM_NODEID": "x"})


def test_the_meeting_point_of_slurm_alone(task: Task) -> None:
    assert task.place(SRUN, UNSAID, "cluster.rendezvous=slurm") == 2
    assert meeting_point(task.spec) == f"node08:{FIRST_PORT + 4711}"
    assert "no task of Slurm" in task.refused(TORCHRUN, UNSAID, "cluster.rendezvous=slurm")
    assert "--rendezvous HOST:PORT" in task.refused({}, FOUR)
