"""What runs that are not going on have left on tmpfs: removed where it is of no use, told where it may be."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ..format.jsonfile import Unreadable, read
from ..format.layout import RunDir
from ..lock import FolderLock, Locked
from . import slots as memory
from .slots import OWNER, MemoryDir, node_of


@dataclass(frozen=True)
class Swept:
    """What lies on tmpfs of runs that are not going on."""

    removed: list[str]
    """One line each: what was removed, and why."""
    left: list[str]
    """One line each: what may still be the only copy of a state, how large it is, and how to remove it."""


def sweep() -> Swept:
    """Remove this user's folders on tmpfs whose run folder belongs to another run by now.

    A run folder that is out of reach proves nothing: its disk may be unmounted, it may be moved or its `run.json`
    garbled, and the snapshots may be all there is of that run. Those are left, and told of; what a live run holds is
    passed over.
    """
    removed, left = [], []
    for path in sorted(memory.TMPFS.glob(f"dtrain-{os.getuid()}-*")):
        if path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(Locked, OSError), FolderLock(path):  # a live run holds it, maybe in another container
            why = _why_useless(path)
            if why is not None:
                shutil.rmtree(path)
                removed.append(f"removed {path}: {why}")
            elif MemoryDir(path).every_slot() and (whose := _whose(path)) is not None:
                size = f"{_nbytes(path) / 2**20:,.1f} MiB"
                left.append(f"{path} ({size}): snapshots of {whose}; rm -r {path} if that run is gone for good")
    return Swept(removed, left)


def _why_useless(path: Path) -> str | None:
    """Why nobody can ever go on from the snapshots there; None when somebody may."""
    try:
        owner = read(path / OWNER)
        run = RunDir(Path(str(owner["output_dir"])), node_of(path))
        current = read(run.run)["run_id"]
    except (Unreadable, KeyError, ValueError):
        empty = not MemoryDir(path).every_slot() and not (path / OWNER).exists() and not _is_young(path)
        return "nothing was in it" if empty else None
    return None if current == owner.get("run_id") else f"{run.root} belongs to another run by now"


def _whose(path: Path) -> str | None:
    """Whose snapshots are out of their run's reach, and why; None when the run can go on from them."""
    try:
        run = RunDir(Path(str(read(path / OWNER)["output_dir"])), node_of(path))
    except (Unreadable, KeyError) as error:
        return f"a run that does not say where it is ({error})"
    if not run.root.exists():
        return f"the run in {run.root}, which is not there now (moved, deleted, or its disk not mounted)"
    try:
        return None if "run_id" in read(run.run) else f"the run in {run.root}, whose {run.run.name} has no run_id"
    except Unreadable as error:
        return f"the run in {run.root}, which cannot be read ({error})"


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*"))


def _is_young(path: Path) -> bool:
    """A folder without an owner yet may be one that another process is making right now."""
    try:
        return time.time() - path.stat().st_mtime < 60
    except OSError:
        return True
