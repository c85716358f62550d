"""Real jobs for tests: the command as a person types it, on tiny specs, with everything it leaves behind looked at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.slots import memory_dir

COMMAND = [str(Path(sys.executable).parent / "dtrain")]
STEPS = 12
SPEC = """
name: tiny
output_dir: {output_dir}
seed: 7
max_steps: {steps}
model: {{type: gpt, n_layers: 2, d_model: 32, n_heads: 2, dropout: 0.1}}
dataset: {{type: text, path: {text}, seq_len: 32}}
training:
  global_batch_size: 16
  micro_batch_size: 4
  max_grad_norm: 1.0
  optimizer: {{name: adamw, lr: 3e-3}}
  scheduler: {{name: cosine, warmup_steps: 3}}
cluster: {{workers_per_node: 2, device: cpu, heartbeat_timeout: 2s}}
tiers:
  - {{type: memory, every: 1}}
  - {{type: disk, every: 3, keep: 3}}
"""


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        """Everything a person saw."""
        return self.out + self.err


@dataclass
class Job:
    """One run's folder, its spec, and the commands on it."""

    folder: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def spec(self) -> Path:
        return self.folder / "spec.yaml"

    def write_spec(self, text: str = SPEC, steps: int = STEPS) -> Path:
        """Write the spec and the little corpus beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = self.folder / "corpus.txt"
        corpus.write_bytes(b"".join(f"line {n} of a text, {n * n} in all\n".encode() for n in range(3000)))
        self.spec.write_text(text.format(output_dir=self.run.root, text=corpus, steps=steps))
        return self.spec

    def start(
        self, *words: str, fault: str = "", env: dict[str, str] | None = None, within: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start a command in a session of its own; `within` is a command that runs it somewhere else."""
        environment = {**os.environ, "DTRAIN_FAULT": fault, "COLUMNS": "120", **self.extra, **(env or {})}
        return subprocess.Popen(
            [*within, *COMMAND, *words],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def do(self, *words: str, fault: str = "", timeout: float = 90, env: dict[str, str] | None = None) -> Ended:
        """Run a command to its end."""
        started = time.monotonic()
        process = self.start(*words, fault=fault, env=env)
        return finish(process, started, timeout)

    def losses(self) -> dict[int, float]:
        """Loss by step; the last line of a repeated step counts."""
        return {line["step"]: line["loss"] for line in read_lines(self.run.metrics)}

    def rates(self) -> dict[int, tuple[float, float]]:
        """Learning rate and gradient norm by step."""
        return {line["step"]: (line["lr"], line["grad_norm"]) for line in read_lines(self.run.metrics)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of a kind."""
        return [line for line in read_lines(self.run.events) if line["event"] == kind]

    def digest(self) -> str:
        """State digest of the finished run."""
        return str(self.events("finished")[-1]["state_digest"])

    def processes(self) -> list[psutil.Process]:
        """Every process that works for this run."""
        marks = (str(self.run.root), str(memory_dir(self.run).path), str(self.folder))
        found = []
        for process in psutil.process_iter(["cmdline", "cwd", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            inside = (process.info["cwd"] or "").startswith(str(self.folder))
            if (any(mark in words for mark in marks) or inside) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def running(self, module: str) -> list[psutil.Process]:
        """The processes of one module; a process may end at any moment."""
        return [process for process in self.processes() if module in " ".join(process.info["cmdline"] or [])]

    def workers(self) -> list[psutil.Process]:
        """The workers, by rank."""
        by_rank = {}
        for process in self.running("dtrain.engine.worker"):
            with contextlib.suppress(psutil.Error, KeyError):
                by_rank[int(process.environ()["RANK"])] = process
        return [by_rank[rank] for rank in sorted(by_rank)]

    def drainers(self) -> list[psutil.Process]:
        """The drainers."""
        return self.running("dtrain.tiers.drain.drainer")

    def stopped(self) -> list[psutil.Process]:
        """Those of the run's processes that a fault of kind `stop` has stopped."""
        return [process for process in self.processes() if process.info["status"] == psutil.STATUS_STOPPED]

    def kill_all(self) -> None:
        """Kill -9 of the whole job: launcher, workers, drainer."""
        for _ in range(3):
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)

    def assert_nothing_left(self) -> None:
        """No process, nothing in memory, no temporary file."""
        wait(lambda: not self.processes(), 5, "the processes to end")
        assert not memory_dir(self.run).path.exists()
        checkpoints = self.run.root / "checkpoints"
        odd = [p for p in self.run.root.rglob("*") if p.name.startswith(".") or p.suffix == ".tmp"]
        assert not odd
        if checkpoints.is_dir():
            assert all((folder / "manifest.json").is_file() for folder in checkpoints.iterdir())


def slow(first: int, last: int = STEPS, attempt: int | None = 1) -> str:
    """Steps that leave time for something to happen in them."""
    return ";".join(fail_at(0, step, "step.start", kind="slow", attempt=attempt) for step in range(first, last + 1))


def finish(process: subprocess.Popen[str], started: float | None = None, timeout: float = 90) -> Ended:
    """Wait for a started command."""
    started = time.monotonic() if started is None else started
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err, time.monotonic() - started)


def wait(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)


def wait_for_step(job: Job, step: int, timeout: float = 60) -> None:
    """Wait until a step is finished."""
    wait(lambda: max(job.losses(), default=0) >= step, timeout, f"step {step}")


def assert_same(job: Job, oracle: Job) -> None:
    """The run went as the unbroken one did: every loss, learning rate, norm, and the state, bit for bit."""
    assert job.losses() == oracle.losses()
    assert job.rates() == oracle.rates()
    assert job.digest() == oracle.digest()


@contextlib.contextmanager
def cleaned(job: Job) -> Iterator[Job]:
    """Leave nothing behind, whatever the test did."""
    try:
        yield job
    finally:
        job.kill_all()
        memory_dir(job.run).remove()


def unbroken(folder: Path, workers: int, words: Sequence[str]) -> Job:
    """A job of workers on one node to which nothing happens, at its end; each has one thread, as those of nodes."""
    job = Job(folder, {"OMP_NUM_THREADS": "1"})
    job.write_spec()
    with cleaned(job):
        ended = job.do("run", "spec.yaml", f"cluster.workers_per_node={workers}", *words)
        assert ended.code == 0, ended.said
    return job


def document(ended: Ended) -> dict[str, Any]:
    """The one JSON document on stdout."""
    value: dict[str, Any] = json.loads(ended.out)
    return value
