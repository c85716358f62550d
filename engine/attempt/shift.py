"""The workers of one attempt on one node, from their start until everything they left behind is cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...planners.sharding.mesh import mesh_of
from ...specs.models import Spec
from ...tiers.format.layout import RunDir
from ...tiers.memory.heartbeat import DONE_STEP, clear_heartbeats, end_group, end_workers, read_heartbeats
from ...tiers.memory.slots import MemoryDir, open_memory_dir
from ...tiers.reading.recovery import Candidate
from ..job import Job
from .agent import ALONE, Ended, Seat, StopSignals, run_workers
from .forks import NurseryProcess, plain_command
from .reports import Report
from .stragglers import Stragglers
from .supervise import Elsewhere, Eyes, Supervisor
from .ticker import Ticker
from .verdict import notes_of

WATCH_S = 0.25


class Shifts:
    """Runs the workers of this node, attempt after attempt."""

    def __init__(
        self, run: RunDir, spec: Spec, memory: MemoryDir, run_id: str, import_paths: tuple[str, ...],
        nursery: NurseryProcess | None, signals: StopSignals, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Prepare; `tell` gets what a person should know. Without a nursery every worker imports everything itself."""
        self.signals = signals
        self.run, self.spec, self.memory, self.run_id = run, spec, memory, run_id
        self.import_paths, self.nursery, self.tell = import_paths, nursery, tell
        self._cut = False

    def work(
        self, attempt: int, candidates: Sequence[Candidate], skipped: Sequence[dict[str, Any]], *,
        watch: Callable[[], None], seat: Seat = ALONE, elsewhere: Elsewhere | None = None,
    ) -> Report:  # fmt: skip
        """Run the workers once. `watch` is called a few times a second meanwhile, from a thread.

        Of several nodes node 0 judges alone which rank stands still; it is told of the others `elsewhere`.
        """
        if not self.memory.path.is_dir():
            open_memory_dir(self.run, self.run_id)
            self.tell(f"{self.memory.path} was removed by somebody; its snapshots are lost")
        clear_heartbeats(self.memory)
        self.memory.forget_copies(candidates[0].version if candidates else None, self.spec.world_size)
        job = Job(
            str(self.run.root), str(self.memory.path), self.run_id, attempt, self.import_paths,
            tuple(candidates), tuple(skipped), self.run.node, self.spec.cluster.nodes,
        ).write()  # fmt: skip
        self._cut = False
        timeout_s = self.spec.cluster.heartbeat_timeout
        supervisor = Supervisor(
            Eyes(self.memory, seat.ranks(self.spec.cluster.workers_per_node)), timeout_s,
            self.spec.cluster.startup_timeout, self._give_up_nursery, elsewhere, judges=seat.node == 0,
            stragglers=Stragglers(mesh_of(self.spec), timeout_s, self.tell),
        )  # fmt: skip
        try:
            with supervisor, Ticker("dtrain-watch", WATCH_S, watch):
                ended = run_workers(self.run, attempt, self.spec, self._command(job), seat)
        finally:
            self.signals.take_back()
            beats = read_heartbeats(self.memory)
            for beat in beats:
                end_group(beat)
            self.memory.settle()
        notes = notes_of(self.run, attempt, seat.ranks(self.spec.cluster.workers_per_node))
        at_work = {beat.rank: beat.step for beat in beats if beat.step < DONE_STEP}
        peaks = {beat.rank: beat.peak for beat in beats if beat.peak}
        return Report(self._ended(ended), tuple(notes), tuple(supervisor.hangs), at_work, peaks)

    def cut(self) -> None:
        """The attempt is over on another node: end the workers that have not noticed. To be called from `watch`."""
        self._cut = True
        end_workers(self.memory)

    def _ended(self, ended: Ended) -> Ended:
        """Without those that we have ended ourselves: they are no cause of anything."""
        if not self._cut:
            return ended
        return Ended(
            {rank: code for rank, code in ended.exit_codes.items() if code != -signal.SIGKILL}, ended.signal_number
        )

    def _command(self, job: Path) -> list[str]:
        if self.nursery is not None and self.nursery.is_there():
            return self.nursery.command(job)
        if self.nursery is not None:
            self.tell("the process that forks the workers has died: they are started one by one")
            self.nursery = None
        return plain_command(job)

    def _give_up_nursery(self) -> None:
        """The workers have ended and the agent was not told: the nursery or a stand-in is stopped, or stuck."""
        if self.nursery is not None:
            self.tell("the workers have ended, but what forked them stood still: ended")
            self.nursery.give_up()
