"""Snapshots: the state of a step copied slice by slice into a slot while the next step computes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...planners.sharding.shards import own
from ...tiers import faults
from ...tiers.format.digest import digest
from ...tiers.format.layout import Version
from ...tiers.format.shardfile import Entry, Shard, TooManyTensors
from ...tiers.memory.slots import PEER_SLOTS, SLOTS, MemoryDir, SlotRecord
from .boundary import Boundary
from .buckets import in_parts, update_in_parts
from .copier import Copier, HostMover, NonFinite
from .decided import Copied, Late, Offered, Refused
from .device import Side, side_of
from .device_copier import DeviceCopier
from .drainwatch import DrainWatch
from .live import Live
from .offers import Offers
from .slot import OpenSlot
from .state import StateError, TrainState

WAIT_S = 0.005


@dataclass(frozen=True)
class Cadence:
    """Which steps are stored where; 0 means never. `slow` is the first tier that the drainer fills.

    `drain_patient`: wait for a slow tier rather than leave a checkpoint out.
    """

    memory: int
    slow: int
    drain_patient: bool

    def memory_due(self, step: int) -> bool:
        """Tell whether the state of `step` belongs to the memory tier."""
        return self.memory > 0 and step % self.memory == 0

    def drain_due(self, step: int) -> bool:
        """Tell whether the state of `step` belongs to the first slower tier."""
        return self.slow > 0 and step % self.slow == 0


@dataclass(frozen=True)
class Pace:
    """The plan's storage parameters: bytes that each kind of window may copy, in slices of `slice_bytes`."""

    forward_bytes: int
    backward_bytes: int
    slice_bytes: int


class Snapshots:
    """Stores this rank's shard of every due step; one per worker."""

    def __init__(
        self,
        state: TrainState,
        memory: MemoryDir,
        *,
        run_id: str,
        attempt: int,
        device: torch.device,
        cadence: Cadence,
        pace: Pace,
        restored: Version | None,
        alive: Callable[[], None],
        clears_up: bool = True,
        offers: Offers | None = None,
        side: Side | None = None,
    ) -> None:
        """Lay out the shard, map the slots, start the copier. `restored` stays untouched until it is superseded.

        One rank of each node `clears_up` what another world size has left there, once that is superseded. With `offers`
        other nodes get copies, and what those need is kept, too. `side` is the stream over which a state is copied that
        is not in host memory; that of `device` unless given.
        """
        self.state, self.memory, self.run_id, self.attempt = state, memory, run_id, attempt
        self.rank, self.world, self.side = state.rank, state.mesh.world, side or side_of(device)
        rank, world = self.rank, self.world
        self.cadence, self.pace, self.alive, self.offers = cadence, pace, alive, offers
        self.pieces = own(state.held(), rank)
        self.leads = rank == state.mesh.stage(rank)[0]
        """Of the ranks with the same layers the first one stores what is alike on all of them and small: buffers."""
        self.live = Live(state, self.pieces)
        self.constant_bytes = sum(piece.nbytes for piece in self.pieces)
        self.boundary = Boundary(state, device, self.constant_bytes, leads=self.leads, aside=self.side is not None)
        self.shard = Shard(rank, world, run_id, self._entries())
        self.bytes_over_ranks = self.shard.data_bytes * world
        """Of one snapshot on all ranks together; whoever has the sum over them puts it here."""
        self.header = _header(self.shard)
        self.header_digest = digest(self.header)
        self.slots = self._open_slots()
        self.drains = DrainWatch([slot.slot for slot in self.slots])
        self._drop_all_but(restored)
        self.safe = restored
        self.outdated = memory.left_by_other_worlds(world) if clears_up else []
        self.current: Version | None = None
        self.unpinned: OpenSlot | None = None
        """Slot of the current snapshot when it is due in the slow tier and the drainer was busy at its begin."""
        self.refused: str | None = None
        """The tensor for which this rank does not keep the current snapshot."""
        self.copy_seconds = 0.0
        self.waited_s = 0.0
        """For slots that the drainer held, and for copies on their way to other nodes, over all snapshots."""
        self._began = 0.0
        self._held = False
        """The device waits with the update until all is copied: from then on the state may change."""
        self._judging = threading.Lock()
        self.copier: Copier | DeviceCopier = (
            Copier(HostMover(), pace.slice_bytes) if self.side is None else DeviceCopier(self.side, pace.slice_bytes)
        )

    def _open_slots(self) -> list[OpenSlot]:
        size = len(self.header) + self.shard.data_bytes
        count = SLOTS + (PEER_SLOTS if self.offers is not None else 0)
        slots = [OpenSlot(slot, self.header, size) for slot in self.memory.slots(self.rank, self.world, count)]
        if self.side is not None:
            for slot in slots:
                slot.lock_pages(self.side)
        return slots

    def _entries(self) -> tuple[Entry, ...]:
        entries = [
            Entry(p.tensor.name, p.tensor.dtype, p.shape, p.offset, p.tensor.shape, p.nbytes) for p in self.pieces
        ]
        entries += [
            Entry(info.name, info.dtype, info.shape, (0,) * len(info.shape), info.shape, info.nbytes)
            for info in self.boundary.infos
        ]
        return tuple(entries)

    def _drop_all_but(self, kept: Version | None) -> None:
        """Whatever else lies in the slots is from a past that the run did not continue."""
        for slot in self.slots:
            record = slot.slot.record()
            slot.version = record.version if record is not None else None
            if record is None or not (record.version == kept or slot.slot.pinned or self._keeps(record.version)):
                slot.slot.invalidate()
                slot.version = None

    def begin(self, step: int, meta: dict[str, Any], *, drain_busy: bool) -> Offered | None:
        """The update of `step` is done: take on its snapshot, if it is due. `meta` goes into the manifest.

        `drain_busy` is what all ranks agreed on: the drainer of one of them still holds a slot. Then one that is due
        in the slow tier is pinned all the same where training is to wait for that (`when_slow`); else `offer` decides.
        Returns what is decided now, None when that is nothing.
        """
        due = self.cadence.drain_due(step)
        drain = due and (self.cadence.drain_patient or not drain_busy)
        if due or self.cadence.memory_due(step):
            slot = self.take(step, meta, drain=drain)
            self.unpinned = slot if due and not drain else None
        return Offered(step, True) if drain else None

    def take(self, step: int, meta: dict[str, Any], *, drain: bool) -> OpenSlot:
        """Take on the snapshot of `step` whether it is due or not, and return its slot; with `drain` pin it."""
        faults.point("copy.begin", step)
        slot = self._free_slot()
        version = Version(attempt=self.attempt, step=step)
        slot.slot.invalidate()
        slot.version = version
        further, spans = self.boundary.take(slot.write)
        self.live.look()
        self.current, self.refused, self._held = version, None, False
        commit = self._committer(slot, version, spans, meta if self.rank == 0 else {}, drain)
        self._began = time.perf_counter()
        self.copier.begin(step, [*self.live.items, *further] if further else self.live.items, slot.data, commit)
        return slot

    def _committer(
        self, slot: OpenSlot, version: Version, spans: list[tuple[int, int]], meta: dict[str, Any], drain: bool
    ) -> Callable[[list[str]], None]:
        """What the copier does last; `spans` are those in the slot's data that it has not copied itself."""

        def commit(digests: list[str]) -> None:
            self._check_unchanged(self.live.changed)
            self.copy_seconds = time.perf_counter() - self._began
            written = [digest(slot.read(begin, end)) for begin, end in spans]
            runs = self.live.run_lengths
            faults.point("copy.record", version.step)
            record = SlotRecord(
                run_id=self.run_id,
                step=version.step,
                attempt=version.attempt,
                rank=self.rank,
                world=self.world,
                slot=slot.slot.index,
                header_digest=self.header_digest,
                digests=(*digests, *written),
                meta=meta,
                runs=(*runs, *(1 for _ in self.boundary.infos)) if runs else (),
            )
            slot.slot.commit(record, drain=drain)
            faults.point("copy.committed", version.step)

        return commit

    def set_pace(self, pace: Pace) -> None:
        """Copy at another pace from now on."""
        self.pace, self.copier.slice_bytes = pace, pace.slice_bytes

    def forward_window(self) -> None:
        """A forward pass begins."""
        self.drains.look()
        self.copier.grant(self.pace.forward_bytes)

    def backward_window(self) -> None:
        """A backward pass begins."""
        self.drains.look()
        self.copier.grant(self.pace.backward_bytes)

    @property
    def ends_after_update(self) -> bool:
        """Tell whether a device waits for the copy, not the training thread, which sees its end after the update."""
        return self.side is not None

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the update; a device that still copies waits with each part of it for what that changes.

        Then `finish` comes after it; on the host it has come before.
        """
        if self.current is None or not isinstance(self.copier, DeviceCopier):
            optimizer.step()
            return
        with self._judging:
            self._check_constant(self.live.changed)
            self._held = True
        if self.copier.hand_over_all() or not in_parts(optimizer):
            self.copier.hold()
            optimizer.step()
        else:
            update_in_parts(optimizer, self.live.last_items(), self.copier.hold)

    def finish(self) -> int:
        """Wait for the snapshot under way; returns its bytes, 0 when there was none or this rank has `refused` it."""
        if self.current is None:
            return 0
        try:
            self.copier.finish()
        except NonFinite as error:
            self.refused = self.live.not_finite(error.number)
        # what has changed by the end of the copy is an error by now; what does later would be in a slower copy
        self._check_unchanged(self.live.written if self.refused is None else self.live.changed)
        return self.shard.data_bytes if self.refused is None else 0

    def _check_unchanged(self, changed: Callable[[], str | None]) -> None:
        """Raise StateError when something was written into the state before all of it was copied: it may be a mix."""
        with self._judging:
            if not self._held:
                self._check_constant(changed)

    def _check_constant(self, changed: Callable[[], str | None]) -> None:
        name = changed()
        if name is None:
            return
        for slot in self.slots:
            if slot.version == self.current:
                slot.slot.invalidate()
        raise StateError(
            f"{name} was changed during a forward or backward pass of the step after it was updated, "
            "so its snapshot is not of one step; what a model changes itself belongs in a buffer "
            "(register_buffer): buffers are copied between steps"
        )

    def superseded(self) -> Version | None:
        """Every rank has finished: the snapshot is whole, older ones may be overwritten. Returns its version."""
        if self.current is not None:
            self.safe = self.current
            if self.offers is None:
                self._drop_outdated()
        whole, self.current = self.current, None
        return whole

    def offer(self, *, drain_busy: bool) -> Offered | None:
        """Decide on the newest whole snapshot if that is still to be done: it is pinned unless the drainer is busy.

        `drain_busy` is what all ranks agreed on after they had finished it. So one checkpoint after the other reaches
        a tier that takes less than a step for each; at most one is pinned, and there is a slot for the next snapshot.
        """
        slot, self.unpinned = self.unpinned, None
        if slot is None or slot.version is None:
            return None
        if not drain_busy:
            slot.slot.pin()
            self.drains.add(slot.slot)
        return Offered(slot.version.step, not drain_busy)

    def refuse(self, tensor: str) -> Refused:
        """A rank has refused the snapshot for a tensor: no rank keeps it, the older one stays."""
        assert self.current is not None
        self.unpinned = None
        refused, self.current, self.refused = Refused(self.current, tensor), None, None
        for slot in self.slots:
            if slot.version == refused.version:
                slot.slot.invalidate()
                slot.version = None
        return refused

    def salvage(self) -> None:
        """The step has failed: complete this rank's copy all the same, the others may have theirs."""
        if self.current is not None:
            with contextlib.suppress(Exception):
                self.copier.finish()

    def _keeps(self, version: Version | None) -> bool:
        """Tell whether copies on other nodes need a version."""
        return self.offers is not None and self.offers.keeps(version)

    def wait_for_peers(self) -> None:
        """Before the ranks agree on what other nodes get next: wait for what is under way to them, where it is late."""
        if self.offers is not None:
            newest = self.current if self.current is not None and self.refused is None else self.safe
            self.waited_s += self.offers.wait(newest, self.alive)

    def share(self, *, busy: bool) -> Copied | Late | None:
        """Decide what other nodes get next; `busy` is what all ranks agreed on. Returns what they have got, or lack."""
        if self.offers is None:
            return None
        slots = (slot.slot for slot in self.slots if slot.version == self.safe)
        decided = self.offers.decide(self.safe, slots, busy=busy)
        if isinstance(decided, Copied):  # until then a node that is lost takes its part of all newer ones along
            self._drop_outdated()
        return decided

    def _drop_outdated(self) -> None:
        while self.outdated:
            self.outdated.pop().unlink(missing_ok=True)

    def close(self) -> None:
        """End the copier, and let go of the pages that were locked for it."""
        self.copier.stop()
        if self.side is not None:
            for slot in self.slots:
                slot.unlock_pages(self.side)

    def draining(self) -> bool:
        """Tell whether the drainer still holds one of this rank's slots."""
        return self.drains.draining()

    def _free_slot(self) -> OpenSlot:
        """A slot that holds neither the newest whole version nor one the drainer needs; waits for it."""
        started = time.perf_counter()
        while True:
            for slot in self.slots:
                needed = slot.version is not None and (slot.version == self.safe or self._keeps(slot.version))
                if not needed and not slot.slot.pinned:
                    self.waited_s += time.perf_counter() - started
                    return slot
            self.alive()
            time.sleep(WAIT_S)


def _header(shard: Shard) -> bytes:
    try:
        return shard.header()
    except TooManyTensors as error:
        raise StateError(str(error)) from error
