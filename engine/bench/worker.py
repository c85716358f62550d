"""A worker of `dtrain bench`, `python -m dtrain.engine.bench.worker JOB.json`: blocks of steps of all methods.

It is the worker of a run up to the loop, and takes the steps of a run; only who stores them alternates. Rank 0 measures
and writes what it finds into a file, line by line.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import psutil
import torch

from ...planners.compare import Block, order, rounds_that_fit, steps_that_suit
from ...planners.methods import PLAIN
from ...specs.codes import Code
from ...tiers.format.jsonfile import append_line, dumps, read, replace
from ...tiers.format.layout import RunDir
from ..parallel.context import Context, join, leave
from ..process import LAUNCHER
from ..training.parts import Parts, assemble
from ..training.report import Reporter
from ..worker import Worker, run
from .rivals import Method, Plain, build_methods

WARM_UP = 1
"""Steps after a switch that are not timed: they pay for the switch."""


@dataclass(frozen=True)
class Wanted:
    """What the person asked for; None: chosen by how long a step takes here."""

    methods: tuple[str, ...]
    blocks: int | None
    steps: int | None
    budget_s: float
    """Time that the blocks may take where their number is not given."""

    def write(self, run: RunDir) -> None:
        """Leave it for the workers."""
        replace(_wanted_file(run), dumps(asdict(self)))


def read_wanted(run: RunDir) -> Wanted:
    """Read what `write` left. Raises Unreadable."""
    value = read(_wanted_file(run))
    return Wanted(**{**value, "methods": tuple(value["methods"])})


def _wanted_file(run: RunDir) -> Path:
    return run.root / "wanted.json"


def lines_of(run: RunDir) -> Path:
    """The file into which rank 0 writes what it does and finds."""
    return run.root / "bench.jsonl"


class RivalFailed(Exception):
    """A save went wrong on this or another rank; the message says how."""


@dataclass
class Recorder(Reporter):
    """Reports as in a run, and keeps the metrics of the last step."""

    last: dict[str, Any] = field(default_factory=dict, init=False)

    def step(self, metrics: dict[str, Any], tokens: int | None, samples: int, tokens_seen: int | None) -> None:
        """One line of metrics.jsonl."""
        self.last = metrics
        super().step(metrics, tokens, samples, tokens_seen)


class BenchWorker(Worker):
    """One rank of a benchmark."""

    context: Context
    parts: Parts
    recorder: Recorder

    def train(self) -> NoReturn:
        """Join the others, try every method once, then measure in rounds."""
        wanted = read_wanted(self.run)
        self.context = join(self.spec, self.memory, self.stop, self.heartbeat)
        self.recorder = Recorder(self.run, self.job.attempt, active=self.context.rank == 0)
        self.parts = assemble(self.spec, self.context)
        ours = any(name.startswith("dtrain") for name in wanted.methods)
        snapshots = self._snapshots(self.parts, self.context, None) if ours else None
        methods = build_methods(wanted.methods, self.parts, self.context, self.run, snapshots)
        self._tell("built", torch=torch.__version__, threads=torch.get_num_threads(), device=self.context.device.type)
        tried = self._try_all(methods)
        methods = {name: method for name, method in methods.items() if name in tried}
        steps, rounds = self._size(wanted, tried)
        self._rounds({PLAIN: Plain(), **methods}, steps, rounds)
        self._tell("done")
        self.context.sign_off()
        for helper in multiprocessing.active_children():  # DCP's process; what it wrote is thrown away anyhow
            helper.kill()
        leave(self.context, Code.DONE)

    def _try_all(self, methods: dict[str, Method]) -> dict[str, Block]:
        """A first block of each, which pays for first uses; those that fail are left out, on all ranks."""
        tried = {PLAIN: self._block(Plain(), 1)}
        for name, method in methods.items():
            self._tell("trying", method=name)
            try:
                tried[name] = self._block(method, 1, trial=True)
            except RivalFailed as error:
                self._tell("failed", method=name, error=str(error))
        return tried

    def _size(self, wanted: Wanted, tried: dict[str, Block]) -> tuple[int, int]:
        """Timed steps of a block and number of rounds, as wanted or as the time allows; rank 0's clock counts."""
        steps = wanted.steps or steps_that_suit(tried[PLAIN].step_s)
        sequence = order([name for name in tried if name != PLAIN], 0)
        round_s = sum((WARM_UP + steps) * tried[name].step_s + tried[name].tail_s for name in sequence)
        rounds = wanted.blocks or rounds_that_fit(max(round_s, 1e-3), wanted.budget_s)
        mine = [float(steps), float(rounds)] if self.context.rank == 0 else [0.0, 0.0]
        steps, rounds = (int(value) for value in self.context.sum_over_ranks(mine))
        count = 1 + rounds * len(sequence)
        self._tell("sized", steps=steps, rounds=rounds, blocks=count, seconds=rounds * round_s)
        return steps, rounds

    def _rounds(self, methods: dict[str, Method], steps: int, rounds: int) -> None:
        names = [name for name in methods if name != PLAIN]
        for number in range(rounds if names else 0):
            sequence = order(names, number)
            for name in sequence if number else [PLAIN, *sequence]:
                block = self._block(methods[name], steps)
                self._tell("block", round=number, **block.to_json())

    def _block(self, method: Method, steps: int, *, trial: bool = False) -> Block:
        """A warm-up step and `steps` timed ones, all of them stored by `method`; returns when nothing is under way.

        In a trial a rival may fail: raises RivalFailed then, on all ranks.
        """
        careful = trial and method.snapshots is None
        self.context.all_agree(True)
        method.begin()
        cpu_before_s = self._cpu_s()
        times = []
        for number in range(WARM_UP + steps):
            times.append(self._timed_step(method, careful=careful))
            if trial and number == 0:
                self._guarded(method.finish, careful=careful)  # DCP's process starts within its first save
            method.tidy()
        ended = time.perf_counter()
        self._guarded(method.finish, careful=careful)
        self.context.all_agree(True)
        tail_s = time.perf_counter() - ended
        cpu_s = self._cpu_s() - cpu_before_s
        written = method.written()
        self.context.all_agree(True)  # what is removed does not run into the next block
        return Block(
            method=method.name,
            step_s=fmean(whole_s for whole_s, _ in times[WARM_UP:]),
            blocked_s=fmean(blocked_s for _, blocked_s in times[WARM_UP:]),
            tail_s=tail_s,
            cpu_s=cpu_s,
            saves=len(times),
            memory_bytes=written.memory_bytes,
            disk_bytes=written.disk_bytes,
            disk_saves=written.disk_saves,
        )

    def _timed_step(self, method: Method, *, careful: bool) -> tuple[float, float]:
        """Seconds of one step with its save, and how much of that the training thread was kept by the save."""
        started = time.perf_counter()
        self._step(self.parts, self.context, method.snapshots, None, self.recorder)
        trained = time.perf_counter()
        self._guarded(lambda: method.save(self.progress.step), careful=careful)
        ended = time.perf_counter()
        return ended - started, float(self.recorder.last["stall_s"]) + ended - trained

    def _guarded(self, work: Callable[[], None], *, careful: bool) -> None:
        """Do it; `careful`: if it fails anywhere, all ranks raise RivalFailed together, and none waits for another."""
        if not careful:
            work()
            return
        error = None
        try:
            work()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        if not self.context.all_agree(error is None):
            raise RivalFailed(error or "it failed on another rank")

    def _cpu_s(self) -> float:
        """Processor time so far of everything the launcher has started: workers, their helpers, the drainer."""
        if self.context.rank != 0:
            return 0.0
        total = 0.0
        for process in psutil.Process(int(os.environ[LAUNCHER])).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                total += used.user + used.system
        return total

    def _tell(self, what: str, **details: object) -> None:
        if self.context.rank == 0:
            append_line(lines_of(self.run), {"what": what, **details})


if __name__ == "__main__":
    run(BenchWorker)
