"""A worker: `python -m dtrain.engine.worker JOB.json`, one per rank, started by the launcher."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ..planners.plan import Plan, plan_from_json
from ..specs.codes import Code
from ..specs.load import spec_digest, spec_from_json
from ..specs.models import Spec
from ..tiers import faults
from ..tiers.format.journal import leave_note, tell_losses
from ..tiers.format.jsonfile import read
from ..tiers.format.layout import Version
from ..tiers.memory.heartbeat import Heartbeat, Phase
from ..tiers.memory.slots import PEER_SLOTS, SLOTS, MemoryDir
from ..tiers.stores.access import NO_ROOM
from .data.text import DataError
from .entry import UserCodeError, UserCodeFailed, add_import_paths
from .footprint import Footprint
from .job import Job, Result, read_job, take_error_back, write_error, write_result
from .logstream import keep_going_without_log
from .parallel.context import Context, StopFlag, join, leave, prepare_signals
from .process import die_with_parent
from .restore.catalogue import catalogue, check_ends, state_digest_of
from .restore.exchange import Exchange
from .restore.restore import NothingUsable, Restored, restore
from .snapshot.offers import Offers
from .snapshot.slot import SlotError
from .snapshot.snapshots import Snapshots
from .snapshot.state import StateError
from .training.control import Control, beginning
from .training.evaluation import evaluate
from .training.parts import Parts, assemble
from .training.report import Reporter
from .training.scaling import lacks_scale, scale_of
from .training.step import Progress, TrainingDiverged, diverged, settle, train_step
from .wayout import WayOut

OTHER_DATA = "dataset, held-out part or seed in the spec are not the checkpoint's"
FINAL_ERRORS: dict[type[BaseException], Code] = {
    NothingUsable: Code.DAMAGED,
    StateError: Code.BAD_SPEC,
    DataError: Code.BAD_SPEC,
    SlotError: Code.MISSING_RESOURCE,
    UserCodeError: Code.BAD_SPEC,
    UserCodeFailed: Code.FAILED,
    TrainingDiverged: Code.FAILED,
}


FINAL = tuple(FINAL_ERRORS)


class Worker:
    """One rank of one attempt."""

    def __init__(self, job: Job, stop: StopFlag) -> None:
        """Read what the run is; nothing is built yet."""
        self.job = job
        self.run = job.run
        self.memory = MemoryDir(Path(job.memory_dir))
        self.heartbeat = Heartbeat(self.memory, int(os.environ["RANK"]))
        self.spec: Spec = spec_from_json(read(self.run.spec)).at(job.nodes)
        self.plan: Plan = plan_from_json(read(self.run.plan))
        self.spec_digest = spec_digest(self.spec)
        self.stop = stop
        self.progress = Progress(loss_scale=scale_of(self.spec.training.precision))

    def train(self) -> NoReturn:
        """Join the others, continue from the newest whole step, train to the end or until told to stop."""
        context = join(self.spec, self.memory, self.stop, self.heartbeat)
        slow = self.spec.first_slow_tier
        reporter = Reporter(
            self.run, self.job.attempt, active=context.rank == 0, slow_tier=slow.type if slow is not None else None
        )
        footprint = Footprint(context.device)
        parts = assemble(self.spec, context)
        context.enter(Phase.RESTORING)
        restored = self._restore(parts, context, reporter)
        context.enter(Phase.ROOM)
        snapshots = self._snapshots(parts, context, restored)
        control = Control(self.spec, self.plan, self.run.plan, context, snapshots) if snapshots is not None else None
        self.stop.install()
        footprint.begin()
        context.enter(Phase.FIRST_STEP)
        stop, loss = False, None
        try:
            if self._left_unevaluated(restored, context, reporter):
                stop = self._evaluate(parts, context, snapshots, reporter)
            while self.progress.step < self.spec.max_steps and not stop:
                stop, loss = self._step(parts, context, snapshots, control, reporter)
                if not stop and self.spec.evaluates(self.progress.step):
                    stop = self._evaluate(parts, context, snapshots, reporter)
        except Exception:
            if snapshots is not None:
                snapshots.salvage()
            raise
        finally:
            reporter.end_outage()
        preempted = self.progress.step < self.spec.max_steps
        if snapshots is not None:
            self._last_snapshot(parts, context, snapshots, reporter, preempted=preempted)
        taken = int(context.worst_of_ranks([float(footprint.peak_bytes())])[0])
        if control is not None:
            control.end(taken, reporter)
        context.sign_off()
        digest = state_digest_of(parts.state, catalogue(parts.state, context), context)
        if context.rank == 0:
            result = Result(self.progress.step, digest, loss, preempted, taken or None)
            write_result(self.run, self.job.attempt, result)
        leave(context, Code.PREEMPTED if preempted else Code.DONE)

    def _restore(self, parts: Parts, context: Context, reporter: Reporter) -> Version | None:
        faults.point("restore.before")
        if not self.job.candidates:
            return None
        everything = catalogue(parts.state, context)
        restored = restore(
            parts.state,
            everything,
            self.job.candidates,
            context.rank,
            context.all_agree,
            self.run.spool,
            Exchange(self.memory, context, context.storage, self.spec.cluster.workers_per_node)
            if context.storage is not None
            else None,
        )
        if parts.ends is not None:
            check_ends(parts.state, context)
        self._take_position(restored, parts, reporter)
        digest = state_digest_of(parts.state, everything, context)
        if reporter.active:
            reporter.restored(restored, digest, self.job.skipped)
        faults.point("restore.after")
        return restored.candidate.version

    def _take_position(self, restored: Restored, parts: Parts, reporter: Reporter) -> None:
        data = restored.meta["data"]
        if self.progress.loss_scale is not None and lacks_scale(restored.meta):
            raise StateError(
                f"the checkpoint of {restored.candidate.version} is of a run with a scaled loss (fp16-mixed) and does "
                "not say the scale, so training could not go on as it was; go back further (dtrain resume --from STEP) "
                "or train in another precision (training.precision=bf16-mixed)"
            )
        scale = scale_of(self.spec.training.precision, restored.meta.get("loss_scale"))
        self.progress = Progress(restored.candidate.version.step, data["samples"], scale)
        if data["spec"] != parts.data_digest:
            reporter.event("warning", self.progress.step, detail=OTHER_DATA)
        elif data["fingerprint"] != parts.fingerprint:
            raise DataError(
                f"the data have changed since the checkpoint of step {self.progress.step}: the run would not continue "
                "what it began; put the old data back, or name the new data under another path (dataset.path=…)"
            )
        if restored.fresh_random:
            reporter.event("warning", self.progress.step, detail="more ranks than before: new ones draw anew")

    def _snapshots(self, parts: Parts, context: Context, restored: Version | None) -> Snapshots | None:
        if not self.plan.tiers:
            return None
        cadence, pace = beginning(self.spec, self.plan)
        snapshots = Snapshots(
            parts.state,
            self.memory,
            run_id=self.job.run_id,
            attempt=self.job.attempt,
            device=context.device,
            cadence=cadence,
            pace=pace,
            restored=restored,
            alive=context.beat,
            clears_up=context.local_rank == 0,
            offers=self._offers(context, restored),
        )
        snapshots.bytes_over_ranks = int(context.sum_over_ranks([float(snapshots.shard.data_bytes)])[0])
        return snapshots

    def _offers(self, context: Context, restored: Version | None) -> Offers | None:
        peer, tier = self.plan.tier("peer"), self.spec.peer_tier
        if peer is None or tier is None:
            return None
        patience_s = self.spec.cluster.heartbeat_timeout / 2 if tier.waits else 0.0
        slots = self.memory.slots(context.rank, context.world, SLOTS + PEER_SLOTS)
        return Offers(slots, peer.every, restored, context.gather_bytes, patience_s)

    def _step(
        self,
        parts: Parts,
        context: Context,
        snapshots: Snapshots | None,
        control: Control | None,
        reporter: Reporter,
    ) -> tuple[bool, float | None]:
        started = time.perf_counter()
        context.step = self.progress.step + 1
        outcome = train_step(parts, context, self.progress, snapshots)
        trained = time.perf_counter()
        offered = None
        if snapshots is not None:
            meta = self._meta(parts)
            offered = snapshots.begin(self.progress.step, meta, drain_busy=outcome.drain_busy)
        ended = time.perf_counter()
        metrics = outcome.metrics
        metrics["stall_s"] += ended - trained
        metrics["step_s"] = ended - started
        if snapshots is not None:
            reporter.committed(outcome.committed, snapshots.bytes_over_ranks, snapshots.copy_seconds)
            reporter.refused(outcome.refused)
            if self.spec.peer_tier is not None:
                reporter.copied(outcome.copied, snapshots.bytes_over_ranks * self.spec.peer_tier.replicas)
            reporter.offered(outcome.offered)
            reporter.offered(offered)
        if control is not None:
            control.step(self.progress.step, metrics, reporter)
        seen = self.progress.samples
        reporter.step(metrics, parts.tokens_per_step, seen, parts.tokens_in(seen))
        return outcome.stop, metrics["loss"]

    def _left_unevaluated(self, restored: Version | None, context: Context, reporter: Reporter) -> bool:
        """Tell whether the attempt before has ended between the snapshot of a step and the end of its evaluation."""
        if restored is None or not self.spec.evaluates(restored.step):
            return False
        context.step = restored.step
        return not context.all_agree(reporter.has_evaluated(restored.step))

    def _evaluate(self, parts: Parts, context: Context, snapshots: Snapshots | None, reporter: Reporter) -> bool:
        """Evaluate the state as it is, while its snapshot is copied; returns whether to stop."""
        evaluated, stop = evaluate(parts, context, snapshots)
        if evaluated is not None:
            reporter.evaluated(evaluated)
        return stop

    def _meta(self, parts: Parts) -> dict[str, Any]:
        return self.progress.meta(parts, self.spec_digest)

    def _last_snapshot(
        self, parts: Parts, context: Context, snapshots: Snapshots, reporter: Reporter, *, preempted: bool
    ) -> None:
        """Keep the state of the last step, whatever the intervals: the launcher has it carried to disk.

        Raises TrainingDiverged when it is not finite: a run does not end well with a state that nobody can go on from.
        Stopped from outside under `non_finite: skip`, it ends with the last good one instead.
        """
        if snapshots.current is None and self.progress.step > 0:
            snapshots.take(self.progress.step, self._meta(parts), drain=False)
        snapshots.finish()
        whole, refused = settle(context, snapshots, clean=context.all_agree(snapshots.refused is None))
        snapshots.close()
        reporter.committed(whole, snapshots.bytes_over_ranks, snapshots.copy_seconds)
        if refused is None:
            return
        if not preempted or snapshots.safe is None or self.spec.checkpoint.non_finite == "stop":
            raise diverged(refused, snapshots)
        reporter.refused(refused)


def main(arguments: list[str], worker: type[Worker]) -> NoReturn:
    """Run one rank; what ends it badly is left in a file for the launcher."""
    os.dup2(1, 2)  # one log per rank; both streams were opened on the same file
    die_with_parent()
    prepare_signals()
    stop = StopFlag()
    keep_going_without_log()
    faults.point("worker.start")
    job = read_job(Path(arguments[0]))
    tell_losses(lambda words: leave_note(Path(job.memory_dir), words))
    add_import_paths(*job.import_paths)
    rank = int(os.environ["RANK"])

    def leave_note_of(error: BaseException) -> None:
        write_error(job.run, job.attempt, rank, error, exit_code_of(error), final=isinstance(error, FINAL))

    try:
        made = worker(job, stop)
        with WayOut(made.heartbeat, leave_note_of, lambda: take_error_back(job.run, job.attempt, rank)):
            made.train()
    except Exception as error:
        leave_note_of(error)
        raise


def exit_code_of(error: BaseException) -> Code:
    """The exit code that tells how a worker ended; where it found no room, whoever it was, that is what is missing."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return Code.MISSING_RESOURCE
    return next((code for kind, code in FINAL_ERRORS.items() if isinstance(error, kind)), Code.FAILED)


def run(worker: type[Worker] = Worker) -> None:
    """Entry of the module: leave without waiting for threads or for groups whose other end is dead."""
    code = Code.FAILED
    try:
        main(sys.argv[1:], worker)
    except Exception as error:
        traceback.print_exc()
        code = exit_code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
