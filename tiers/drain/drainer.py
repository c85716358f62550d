"""The drainer: one process per node that carries snapshots from memory to the slower tiers, behind the training's back.

It is also the one that clears up when the launcher is killed, so a run without slower tiers has one too. Started by
the launcher as `python -m dtrain.tiers.drain.drainer JOB.json` with a pipe as standard input. The word `stop` on the
pipe means: finish what is pinned and leave. The pipe closing without it means the launcher is dead: then the
newest whole snapshot is carried on as well, and the memory is given back once it is safe there.

The first tier is filled from memory: the workers pin what belongs there, and at most one snapshot is pinned per rank
unless the spec lets training wait. The next one follows it from checkpoint to checkpoint in a thread of its own; if
the first tier fails, it is filled from memory instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ...specs.codes import Code
from ..fence import Fenced, Taken
from ..format.journal import leave_note, tell_losses
from ..format.jsonfile import append_event, dumps, read
from ..format.layout import RunDir, Version
from ..format.manifest import Manifest
from ..lock import FileLock
from ..memory.gather import Part, gather
from ..memory.heartbeat import end_group, read_heartbeats
from ..memory.slots import MemoryDir, SlotRecord
from ..together import Group
from .follower import Follower
from .writer import TierFailed, TierJob, Writer, tier_job_from_json

POLL_S = 0.05
RESCUE_PATIENCE_S = 15.0
"""Longest wait for the other nodes once our launcher is dead: they may be, too."""
NICENESS = 10


@dataclass(frozen=True)
class DrainJob:
    """What a drainer is told; `tiers` are the slower ones, fastest first."""

    run_dir: str
    memory_dir: str
    run_id: str
    tiers: tuple[TierJob, ...] = ()
    ranks: tuple[int, ...] | None = None
    """Ranks of this node; None: all."""
    node: int = 0
    nodes: int = 1
    patience_s: float = 60.0
    """Longest wait for another node's part of a checkpoint."""
    seat: int | None = None
    """The node's place among the `nodes`, where that is not its number."""
    world: int | None = None
    """Ranks over all nodes, where it may have been another before."""

    def to_bytes(self) -> bytes:
        """The job as JSON."""
        return dumps({**vars(self), "tiers": [tier.to_json() for tier in self.tiers]})


def drain_job_from_json(value: dict[str, Any]) -> DrainJob:
    """Read the form of `to_bytes`."""
    ranks = None if value["ranks"] is None else tuple(value["ranks"])
    return DrainJob(**{**value, "tiers": tuple(map(tier_job_from_json, value["tiers"])), "ranks": ranks})


class Drainer:
    """Carries whole, pinned versions on, oldest first."""

    def __init__(self, job: DrainJob) -> None:
        """Prepare for one run on one node."""
        self.job = job
        self.run = RunDir(Path(job.run_dir), job.node)
        self.memory = MemoryDir(Path(job.memory_dir), job.ranks, job.world)
        group = Group(job.node if job.seat is None else job.seat, job.nodes, job.patience_s, self._is_off)
        writers = [
            Writer(tier, self.run, job.run_id, self._patient(group, place), self.memory.note_taken_over)
            for place, tier in enumerate(job.tiers)
        ]
        for writer in writers:
            writer.closed = writer.name in self.memory.taken_over()
        self.first = writers[0] if writers else None
        # what follows is in a shared place already, so one node carries it on; the others add their parts to it only
        # where the first tier has failed
        self.follower = Follower(writers[0], writers[1]) if len(writers) > 1 and group.leads else None
        self.next = writers[1] if len(writers) > 1 and not group.leads else None
        self.writers = writers
        self.rescued: frozenset[Version] = frozenset()
        """What this node has of a run whose launchers are dead."""

    @staticmethod
    def _patient(group: Group, place: int) -> Group:
        """Another node may wait in vain at each tier before the `place`-th, until it comes to that one, too."""
        return replace(group, patience_s=(1 + place) * group.patience_s)

    def start(self) -> None:
        """Claim the places, clear up what was left, and take up what the follower was at."""
        for writer in self.writers:
            with contextlib.suppress(OSError, Taken, Fenced):  # told of when there is something to write
                writer.open()
        if self.follower is not None:
            self.follower.start()
            self._follow_newest(only_due=True)

    def end(self) -> None:
        """Tell what is still to be told, and give the places back."""
        for writer in self.writers:
            writer.end()

    def next_version(self) -> Version | None:
        """The oldest version that every rank has pinned."""
        if self.first is None:
            return None
        pending = {(slot.rank, slot.index): slot.record() for slot in self.memory.pending()}
        ranks: dict[Version, set[int]] = {}
        worlds: dict[Version, int] = {}
        for record in filter(None, pending.values()):
            ranks.setdefault(record.version, set()).add(record.rank)
            worlds[record.version] = record.world
        own = self.job.ranks
        return min((v for v, found in ranks.items() if found >= set(own or range(worlds[v]))), default=None)

    def drain(self, version: Version, *, last: bool = False) -> bool:
        """Carry one version on and release its slots; False (and an event) when no tier took it.

        `last`: nothing comes after it, so the next tier gets it too, whatever its interval. Raises TierFailed.
        """
        records = self.memory.whole().get(version)
        if records is None or self.first is None:
            return False
        follower = self.follower
        follows = follower is not None and (last or follower.target.belongs(version))

        @contextlib.contextmanager
        def load() -> Iterator[tuple[Manifest | Part, Mapping[str, Path]]]:
            yield gather(self.memory, records)

        try:
            done = self.first.carry(version, load, follower.spared if follower is not None else set, last=last)
            if follower is not None and follows:
                if not done:
                    done = follower.carry_now(version, load, last=last)
                elif not last:  # the newest of all is offered at the very end
                    follower.offer(version)
            if self.next is not None and not done and (last or self.next.belongs(version)):
                done = self.next.carry(version, load, last=last)
            if follower is not None and follower.failure is not None:
                raise follower.failure
        finally:
            self._release(records)
        return done

    def drain_pending(self) -> None:
        """Carry everything that is pinned and whole, and let the last of it reach the last tier."""
        while (version := self.next_version()) is not None:
            self.drain(version, last=version == max(self.memory.whole()))
        if self.follower is not None:
            self._follow_newest(only_due=False)
            self.follower.finish()
            if self.follower.failure is not None:
                raise self.follower.failure

    def _follow_newest(self, *, only_due: bool) -> None:
        """The newest checkpoint of the first tier goes to the next one, if that has not got it yet."""
        assert self.first is not None
        assert self.follower is not None
        with contextlib.suppress(OSError, Taken, Fenced):
            found = [c.version for c in self.first.open().scan()[0]]
            due = [version for version in found if not only_due or self.follower.target.belongs(version)]
            newest = max(due, default=None)
            if newest is not None and newest not in self.follower.spared() and self.follower.target.get(newest) is None:
                self.follower.offer(newest)

    def rescue(self) -> None:
        """The launcher is dead: end what it left, save the newest snapshot, give the memory back."""
        for beat in read_heartbeats(self.memory):
            end_group(beat)
        if self.first is None:
            return  # the memory is the only place there is: it stays for a resume
        newest = max(self.memory.whole(), default=None)
        if self.job.nodes > 1:
            self._rescue_together()
        else:
            self.memory.settle()
            if newest is not None and not self._has(newest):
                self.memory.mark_for_drain(newest)
        self.drain_pending()
        if newest is not None and self._has(newest):
            self.memory.remove()

    def _rescue_together(self) -> None:
        """Save the newest version that all nodes have: no launcher tells us which, so node 0 tries one after another.

        The others add their parts to whichever it begins. A slot may have become whole on one node alone.
        """
        own = sorted(self.memory.whole(), reverse=True)
        own = own[: next((place for place, version in enumerate(own) if self._has(version)), None)]
        self.rescued = frozenset(own)
        self.memory.settle(())
        for writer in self.writers:
            patience_s = min(writer.group.patience_s, RESCUE_PATIENCE_S / max(1, len(own)))
            writer.group = replace(writer.group, patience_s=patience_s)
        deadline = time.monotonic() + RESCUE_PATIENCE_S
        leads = self.writers[0].group.leads
        while own and self.memory.path.is_dir() and time.monotonic() < deadline:
            if any(self._has(version) for version in own):
                return
            version = own.pop(0) if leads else next(filter(self._is_begun, own), None)
            if version is None:
                time.sleep(POLL_S)
                continue
            self.memory.mark_for_drain(version)
            self.drain(version, last=True)

    def _is_begun(self, version: Version) -> bool:
        return any(writer.is_begun(version) for writer in self.writers)

    def _is_off(self, version: Version) -> bool:
        """Tell whether the launcher has taken a version's marks away; without one, whether node 0 tries another."""
        if self.rescued and not self.writers[0].group.leads and any(map(self._is_begun, self.rescued - {version})):
            return True
        return all(record.version != version for slot in self.memory.pending() if (record := slot.record()))

    def _has(self, version: Version) -> bool:
        return any(writer.holds(version) for writer in self.writers)

    def _release(self, records: list[SlotRecord]) -> None:
        slots = {(slot.rank, slot.index): slot for slot in self.memory.pending()}
        for record in records:
            slot = slots.get((record.rank, record.slot))
            if slot is not None:
                slot.drain_mark.unlink(missing_ok=True)


def follow(drainer: Drainer) -> None:
    """Work until told to stop or orphaned."""
    word = b""
    while True:
        version = drainer.next_version()
        if version is not None:
            drainer.drain(version)
            continue
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            data = os.read(0, 64)
            word += data
            if b"stop" in word:
                drainer.drain_pending()
                return
            if not data:
                drainer.rescue()
                return


def step_back() -> None:
    """Let the workers go first: less of the processor, no wake-up in the middle of their slice of it, the disk last."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


def main(arguments: list[str]) -> int:
    """Run the drainer of one node. Returns 69 when a tier failed whose `on_failure` is `stop`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):  # Slurm tells all
        signal.signal(number, signal.SIG_IGN)  # it ends through its pipe, so that it never leaves work half done
    step_back()
    drainer = Drainer(drain_job_from_json(read(Path(arguments[0]))))
    tell_losses(lambda words: leave_note(drainer.memory.path, words))
    with FileLock(drainer.memory.drainer_lock, timeout_s=60):
        try:
            drainer.start()
            follow(drainer)
        except TierFailed as error:
            version = error.version
            told = append_event(
                drainer.run.events, "fault", version.step, version.attempt, rank=None, kind="tier", detail=str(error)
            )
            if not told:  # the disk that failed the tier is that of the events
                leave_note(drainer.memory.path, f"{error}: stopping")
            return Code.MISSING_RESOURCE
        finally:
            drainer.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
