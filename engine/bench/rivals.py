"""The other ways to store a step, used as their documentation says, behind one seam with dtrain's own.

They write pickles, so this is the one file that may; everything goes into a folder that the benchmark made and removes,
and none of it is ever read.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from ...planners.methods import PLAIN
from ...tiers.format.jsonfile import read_lines
from ...tiers.format.layout import RunDir
from ..parallel.context import Context
from ..snapshot.snapshots import Snapshots
from ..training.parts import Parts
from ..training.step import diverged, settle

POLL_S = 0.005


@dataclass(frozen=True)
class Written:
    """What one block has written, on all ranks together; known on rank 0."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_saves: int = 0


class Method(Protocol):
    """One way to store every step. Called on every rank, between the same two steps."""

    @property
    def name(self) -> str:
        """Its name in `planners/methods.py`."""

    @property
    def snapshots(self) -> Snapshots | None:
        """What the training step itself works for, if anything."""

    def begin(self) -> None:
        """A block of this method begins."""

    def save(self, step: int) -> None:
        """The update of `step` is done: store its state. What this takes keeps the training from going on."""

    def tidy(self) -> None:
        """Remove what a newer save has replaced; not timed."""

    def finish(self) -> None:
        """Bring what is under way to its end; not timed."""

    def written(self) -> Written:
        """What the block has written, once it is finished; its files are removed."""


class Plain:
    """No checkpoint."""

    name: str = PLAIN
    snapshots: Snapshots | None = None

    def begin(self) -> None:
        """Nothing."""

    def save(self, step: int) -> None:
        """Nothing."""

    def tidy(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def written(self) -> Written:
        """Nothing."""
        return Written()


class Null(Plain):
    """No checkpoint either, measured like a method that stores: how far it is from plain is the measurement's error."""

    name = "null"


class Dtrain(Plain):
    """Slices in the windows of the next step, as in a run; with `disk` the drainer carries every step it can on."""

    def __init__(self, snapshots: Snapshots, context: Context, run: RunDir, *, disk: bool) -> None:
        """Share the run's one `Snapshots` with the other method of ours."""
        self.name = "dtrain-disk" if disk else "dtrain"
        self.snapshots = snapshots
        self._snapshots, self._context, self._run, self._disk = snapshots, context, run, disk
        self._slow = snapshots.cadence.slow
        self._copied = 0
        self._drained_before = 0
        self._newest = 0

    def begin(self) -> None:
        """Leave the disk out, or put it back."""
        self._snapshots.cadence = replace(self._snapshots.cadence, slow=self._slow if self._disk else 0)
        self._copied, self._drained_before = 0, len(self._drained())

    def save(self, step: int) -> None:
        """The copy was begun by the step itself."""
        self._copied += self._snapshots.current is not None

    def finish(self) -> None:
        """The last copy is whole on all ranks, and the drainer is idle. Raises TrainingDiverged.

        In a run the next step decides on the last checkpoint, and the drainer has that long for the one before.
        """
        self._snapshots.finish()
        clean = self._context.all_agree(self._snapshots.refused is None)
        _, refused = settle(self._context, self._snapshots, clean=clean)
        if refused is not None:
            raise diverged(refused, self._snapshots)
        self._wait_for_drainer()
        self._context.all_agree(True)  # that no slot is held on any rank
        self._snapshots.offer(drain_busy=False)
        self._wait_for_drainer()

    def _wait_for_drainer(self) -> None:
        while self._snapshots.draining():
            self._context.beat()
            time.sleep(POLL_S)

    def written(self) -> Written:
        """By the events of the drainer."""
        drained = self._drained()[self._drained_before :]
        nbytes = sum(int(event["bytes"]) for event in drained)
        return Written(self._copied * self._snapshots.bytes_over_ranks, nbytes, len(drained))

    def _drained(self) -> list[dict[str, Any]]:
        lines = read_lines(self._run.events) if self._disk and self._context.rank == 0 else []
        return [line for line in lines if line["event"] == "committed" and line.get("tier") == "disk"]


class _Files(Plain):
    """What the rivals share: a folder, the newest finished save in it, and a count of bytes."""

    def __init__(self, name: str, parts: Parts, context: Context, folder: Path) -> None:
        self.name = name
        self.parts, self.context, self.folder = parts, context, folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._finished: list[Path] = []
        self._bytes = self._saves = 0

    def begin(self) -> None:
        self._bytes = self._saves = 0

    def _done(self, path: Path) -> None:
        self._finished.append(path)
        self._saves += 1

    def tidy(self) -> None:
        while len(self._finished) > 1:
            self._remove(self._finished.pop(0))

    def written(self) -> Written:
        while self._finished:
            self._remove(self._finished.pop())
        return Written(0, self._bytes, self._saves)

    def _remove(self, path: Path) -> None:
        if self.context.rank != 0:
            return
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        self._bytes += sum(file.stat().st_size for file in files)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class TorchSave(_Files):
    """`torch.save` of the whole state by rank 0 into a new name, then a rename; the others wait in their next step."""

    def __init__(self, name: str, parts: Parts, context: Context, folder: Path, *, fsync: bool) -> None:
        """With `fsync` the file and its folder are made durable too."""
        super().__init__(name, parts, context, folder)
        self.fsync = fsync

    def save(self, step: int) -> None:
        """Write, perhaps make durable, rename."""
        if self.context.rank != 0:
            return
        path = self.folder / f"step-{step}.pt"
        temporary = path.with_suffix(".tmp")
        state = {
            "model": self.parts.model.state_dict(),
            "optimizer": self.parts.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            if self.fsync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if self.fsync:
            _fsync_folder(self.folder)
        self._done(path)


class DcpSave(_Files):
    """`torch.distributed.checkpoint.save` of `get_state_dict`; each rank writes its part and fsyncs it."""

    def __init__(self, name: str, parts: Parts, context: Context, folder: Path, group: dist.ProcessGroup) -> None:
        """Talk over `group`: one that is not DDP's, or their collectives mix and gloo aborts."""
        super().__init__(name, parts, context, folder)
        self.group = group

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.parts.passes.wrapped, self.parts.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def save(self, step: int) -> None:
        """Return when it is written."""
        path = self.folder / f"step-{step}"
        save(self._state(step), checkpoint_id=path, process_group=self.group)
        self._done(path)


class DcpAsyncSave(DcpSave):
    """`async_save`: the state is staged while the training waits, and written behind it; one at a time."""

    def __init__(
        self,
        name: str,
        parts: Parts,
        context: Context,
        folder: Path,
        group: dist.ProcessGroup,
        kind: AsyncCheckpointerType,
    ) -> None:
        """Write from a thread or from a process of its own."""
        super().__init__(name, parts, context, folder, group)
        self.kind = kind
        self._under_way: tuple[Path, Future[Any]] | None = None

    def save(self, step: int) -> None:
        """Wait for the save before, stage this one."""
        self.finish()
        path = self.folder / f"step-{step}"
        response = async_save(
            self._state(step), checkpoint_id=path, process_group=self.group, async_checkpointer_type=self.kind
        )
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        self._under_way = path, future

    def finish(self) -> None:
        """Wait until it is written; raises what went wrong with it."""
        if self._under_way is not None:
            path, future = self._under_way
            self._under_way = None
            future.result()
            self._done(path)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_methods(
    names: Sequence[str], parts: Parts, context: Context, run: RunDir, snapshots: Snapshots | None
) -> dict[str, Method]:
    """Make the named methods, all ranks the same ones in the same order."""
    folder = run.root / "rivals"
    group: dist.ProcessGroup | None = None
    if any(name.startswith("dcp") for name in names):
        group = dist.new_group(backend="gloo")

    def ours(*, disk: bool) -> Method:
        assert snapshots is not None
        return Dtrain(snapshots, context, run, disk=disk)

    def later(name: str, kind: AsyncCheckpointerType) -> Method:
        assert group is not None
        return DcpAsyncSave(name, parts, context, folder, group, kind)

    def now(name: str) -> Method:
        assert group is not None
        return DcpSave(name, parts, context, folder, group)

    makers: dict[str, Callable[[str], Method]] = {
        "null": lambda _: Null(),
        "dtrain": lambda _: ours(disk=False),
        "dtrain-disk": lambda _: ours(disk=True),
        "torch-save": lambda name: TorchSave(name, parts, context, folder, fsync=False),
        "torch-save-fsync": lambda name: TorchSave(name, parts, context, folder, fsync=True),
        "dcp": now,
        "dcp-async-thread": lambda name: later(name, AsyncCheckpointerType.THREAD),
        "dcp-async-process": lambda name: later(name, AsyncCheckpointerType.PROCESS),
    }
    return {name: makers[name](name) for name in names}
