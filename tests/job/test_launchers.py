"""What `dtrain launch` prints really starts a job, Slurm's variables are heeded, a failure is told everywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.job.dtrain import Job, assert_same, finish, wait, wait_for_step
from tests.job.nodes import Cluster, cluster

from dtrain.cli.scheduler import FIRST_PORT, PORTS
from dtrain.tiers.faults import fail_at

SSH = f"""#!{sys.executable}
import os, signal, sys
options = sys.argv[1 : sys.argv.index("--")]
host, command = sys.argv[sys.argv.index("--") + 1 :]
assert options == ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"] and host in ("127.0.0.1", "localhost")
assert "DTRAIN_TOKEN" not in os.environ
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)  # the other machine knows nothing of what is ignored here
os.chdir("/")
os.execvp("sh", ["sh", "-c", command])
"""
SLOW = ";".join(fail_at(0, step, "window.forward", kind="slow") for step in range(3, 9))
BROKEN = """
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 4)
    def forward(self, x, y):
        import os
        if os.environ["RANK"] == "1":
            raise ValueError("the layers do not fit")
        return F.cross_entropy(self.out(x), y)

class Points:
    def __len__(self):
        return 512
    def __getitem__(self, i):
        import torch
        return torch.sin(torch.arange(8.0) * (i + 1)), int(i) % 4
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "job") as made:
        yield made


class Script:
    """What `dtrain launch --to ssh` prints, with an `ssh` that runs the command here."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes, self.job = nodes, nodes.job
        tools = self.job.folder / "tools"
        tools.mkdir()
        (tools / "ssh").write_text(SSH)
        (tools / "ssh").chmod(0o755)
        (self.job.folder / "hosts").write_text("# two nodes\n\n127.0.0.1 slots=1\nme@localhost\n".replace("me@", ""))
        self.path = f"{tools}:{os.environ['PATH']}"
        written = self.job.do("launch", "spec.yaml", "--to", "ssh", "--port", str(nodes.port), "--output", "start.sh")
        assert written.code == 0, written.said

    def start(self, fault: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "start.sh"], cwd=self.job.folder, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **self.job.extra, "PATH": self.path, "DTRAIN_FAULT": fault},
        )  # fmt: skip


@pytest.fixture
def script(nodes: Cluster) -> Script:
    return Script(nodes)


def test_over_ssh_a_job_trains_is_stopped_and_goes_on(script: Script, oracle: Job) -> None:
    started = script.start(fault=SLOW)
    wait_for_step(script.job, 3)
    started.send_signal(signal.SIGTERM)
    ended = finish(started)
    assert ended.code == 75, ended.said
    assert [event["tier"] for event in script.job.events("preempted")] == ["disk"]
    script.nodes.assert_nothing_left()
    ended = finish(script.start())
    assert ended.code == 0, ended.said
    assert_same(script.job, oracle)
    assert not (script.job.run.root / "token").exists(), "the token went through ssh"
    script.nodes.assert_nothing_left()


def test_over_ssh_all_end_when_the_script_is_killed(script: Script) -> None:
    started = script.start(fault=SLOW)
    wait_for_step(script.job, 3)
    started.kill()
    finish(started)
    wait(lambda: not script.job.running("dtrain"), 30, "all to end")
    assert [event["tier"] for event in script.job.events("preempted")] == ["disk"], "as after SIGTERM"
    script.nodes.assert_nothing_left()


def test_tasks_of_slurm_find_each_other_and_stop_when_slurm_tells_every_process(nodes: Cluster) -> None:
    running = []
    number = next(number for number in range(os.getpid() % PORTS, 2 * PORTS) if _is_free(FIRST_PORT + number % PORTS))
    for rank in range(2):
        slurm = {
            "SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank),
            "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,localhost", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        }  # fmt: skip
        running.append(nodes.job.start("run", "--or-resume", "spec.yaml", env=slurm, fault=SLOW))
    wait_for_step(nodes.job, 3)
    for process in nodes.job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGUSR1)
    ended = [finish(process) for process in running]
    assert [one.code for one in ended] == [75, 75], ended
    assert "nodes: 2 by Slurm; this is node 1, they meet at 127.0.0.1:" in ended[1].out
    (preempted,) = nodes.job.events("preempted")
    assert (preempted["tier"], preempted["step"]) == ("disk", max(nodes.job.losses())), "no step is lost"
    nodes.assert_nothing_left()


def test_a_failure_on_another_node_is_named_first_by_all_launchers(nodes: Cluster) -> None:
    (nodes.job.folder / "broken.py").write_text(BROKEN)
    nodes.start_all("model={type: python, entry: broken:Model}", "dataset={type: python, entry: broken:Points}")
    log = nodes.job.run.log(1, 1)
    for ended in nodes.end():
        assert ended.code == 70, ended.said
        assert "node 1, rank 1: ValueError: the layers do not fit" in ended.out, ended.said
        assert str(log.relative_to(nodes.job.folder)) in ended.out, ended.said
        assert "Traceback" not in ended.err
    assert "the layers do not fit" in log.read_text()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
