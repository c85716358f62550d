"""The launcher of a benchmark: the workers once, the drainer beside them as in a run, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from ...planners.plan import Plan
from ...specs.codes import Code
from ...specs.models import Spec
from ...tiers.drain.drainer import DrainJob
from ...tiers.drain.writer import TierJob
from ...tiers.format.jsonfile import read_lines
from ...tiers.format.layout import RunDir
from ...tiers.memory.heartbeat import end_workers
from ...tiers.memory.slots import MemoryDir
from ...tiers.reading.places import place_of
from ..attempt.agent import Ended, StopSignals, run_workers
from ..attempt.forks import plain_command
from ..attempt.supervise import Eyes, Supervisor
from ..attempt.ticker import Ticker
from ..attempt.verdict import find_fault
from ..job import Job, read_error
from ..storage.drain import DrainerProcess
from .worker import Wanted, lines_of

MODULE = "dtrain.engine.bench.worker"
SILENCE_S = 300.0
"""A rival may keep the training thread for minutes; who is silent for longer hangs."""
DRAINER_PATIENCE_S = 60.0
POLL_S = 0.25
ATTEMPT = 1


@dataclass(frozen=True)
class Failure:
    """Why there are no figures."""

    code: Code
    message: str
    trace: str | None = None


class BenchLauncher:
    """Drives one benchmark in a folder of its own. The caller removes the folder and the memory."""

    def __init__(
        self, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, import_paths: tuple[str, ...]
    ) -> None:
        """Prepare; nothing is started yet."""
        self.run, self.spec, self.memory = run, spec, memory
        self.run_id, self.import_paths = run_id, import_paths
        every = {tier.type: tier.every for tier in plan.tiers}
        tiers = tuple(
            TierJob(place_of(tier, run), tier.keep, tier.keep_every, every[tier.type], tier.on_failure)
            for tier in spec.slow_tiers
        )
        job = DrainJob(str(run.root), str(memory.path), run_id, tiers)
        self.drainer = DrainerProcess(run, job, DRAINER_PATIENCE_S, self._stop_for_tier)
        self.tier_failed = False

    def measure(self, wanted: Wanted, signals: StopSignals, told: Callable[[], None]) -> Failure | None:
        """Run all blocks; what they give is in `lines_of(run)`, and `told` is called a few times a second meanwhile.

        The caller has entered `signals`. Raises Interrupted.
        """
        wanted.write(self.run)
        attempt = self.run.next_attempt()
        job = Job(str(self.run.root), str(self.memory.path), self.run_id, attempt, self.import_paths, ()).write()
        supervisor = Supervisor(Eyes(self.memory), SILENCE_S, self.spec.cluster.startup_timeout)
        try:
            self.drainer.start()
            with (
                supervisor,
                Ticker("dtrain-drainer-watch", POLL_S, lambda: self.drainer.tend(attempt)),
                Ticker("dtrain-bench-view", POLL_S, told),
            ):
                ended = run_workers(self.run, attempt, self.spec, plain_command(job, MODULE))
        finally:
            signals.ignore()  # a second Ctrl-C must not keep the first from clearing up
            self._clean_up()
        told()
        return self._verdict(attempt, ended, supervisor)

    def _verdict(self, attempt: int, ended: Ended, supervisor: Supervisor) -> Failure | None:
        if self.tier_failed:
            return Failure(Code.MISSING_RESOURCE, self._tier_words())
        if ended.signal_number is not None:
            return Failure(Code.INTERRUPTED, f"stopped by {signal.Signals(ended.signal_number).name}")
        if any(line["what"] == "done" for line in read_lines(lines_of(self.run))):
            return None
        fault = find_fault(self.run, attempt, ended, supervisor.hangs, self.spec.world_size)
        error = read_error(self.run, attempt, fault.rank) if fault.rank is not None else None
        return Failure(fault.code, fault.detail, None if error is None or error.final else error.trace)

    def _tier_words(self) -> str:
        faults = [line for line in read_lines(self.run.events) if line["event"] == "fault" and line["kind"] == "tier"]
        return f"the disk tier failed: {faults[-1]['detail'] if faults else 'its drainer ended'}"

    def _stop_for_tier(self) -> None:
        """Called by the thread that watches the drainer: without the disk the figures would mean nothing."""
        self.tier_failed = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _clean_up(self) -> None:
        end_workers(self.memory)
        with contextlib.suppress(OSError):
            self.drainer.stop(timeout_s=0.0)
        self.memory.remove()
