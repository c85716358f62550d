"""Where a benchmark writes: a folder of its own on the disk tier's file system, removed when it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...planners.plan import Plan
from ...specs.codes import Code
from ...specs.load import spec_from_json, spec_to_json
from ...specs.models import Spec
from ...tiers.format.layout import RunDir
from ...tiers.lock import FileLock, Locked
from ...tiers.memory.slots import TMPFS, memory_dir
from ..terminal.refusal import Refused

PREFIX = ".dtrain-bench-"
YOUNG_S = 60.0
"""A folder may be this old before its maker holds its lock."""
STEPS_WITHOUT_END = 1_000_000
KEPT = 2
"""Saves of one method on a disk at a time: the newest and the one under way."""


def every_step(spec: Spec, run: RunDir) -> Spec:
    """The spec as it is measured: its memory and disk tiers take every step, in a folder of the benchmark's own.

    The disk leaves out what it is too slow for; if it fails, the benchmark does.
    """
    value = spec_to_json(spec)
    tiers: list[dict[str, Any]] = []
    for tier in value["tiers"]:
        if tier["type"] == "memory":
            tiers.append({**tier, "every": 1})
        elif tier["type"] == "disk":
            disk = {"path": "checkpoints", "every": 1, "keep": 1, "keep_every": None}
            tiers.append({**tier, **disk, "when_slow": "skip", "on_failure": "stop"})
    return spec_from_json({**value, "output_dir": str(run.root), "max_steps": STEPS_WITHOUT_END, "tiers": tiers})


@contextmanager
def folder_of_its_own(spec: Spec) -> Iterator[RunDir]:
    """A new folder on the disk that the spec's checkpoints would lie on, locked; removed at the end."""
    home = home_of(spec)
    _sweep(home)
    run = RunDir(Path(tempfile.mkdtemp(prefix=PREFIX, dir=home)))
    try:
        with FileLock(run.lock):
            yield run
    finally:
        _remove(run)


def home_of(spec: Spec) -> Path:
    """The nearest folder above the disk tier's (or the run's) on the same file system, outside the run's own folder.

    Raises Refused when there is none, or when it cannot be written.
    """
    run = RunDir(Path(spec.output_dir).absolute())
    target = run.disk(spec.disk_tier.path) if spec.disk_tier is not None else run.root
    existing = [path for path in (target, *target.parents) if path.exists()]
    device = device_of(existing[0])
    outside = [p for p in existing if p not in (target, run.root) and run.root not in p.parents]
    home = next((path for path in outside if device_of(path) == device), None)
    if home is None:
        raise Refused(
            Code.MISSING_RESOURCE,
            f"{existing[0]} is a file system of its own, and a benchmark writes nothing into a run's folder; "
            "give another folder on that disk: output_dir=…",
        )
    if not os.access(home, os.W_OK | os.X_OK):
        raise Refused(Code.MISSING_RESOURCE, f"{home} cannot be written; give another folder: output_dir=…")
    return home


def device_of(path: Path) -> int:
    """Which file system a folder lies on."""
    return path.stat().st_dev


def refuse_full(spec: Spec, plan: Plan, run: RunDir, methods: tuple[str, ...]) -> None:
    """Raise Refused where the other methods' files would not fit beside dtrain's own."""
    state = plan.model.state_bytes or 0
    ours = KEPT * state if spec.disk_tier is not None else 0
    theirs = KEPT * state if any(not name.startswith("dtrain") for name in methods) else 0
    free = shutil.disk_usage(run.root).free
    if ours + theirs > free:
        raise Refused(
            Code.MISSING_RESOURCE,
            f"the benchmark needs {ours + theirs:,} bytes in {run.root.parent}, free are {free:,}; "
            "free some, or give a folder on another disk: output_dir=…",
        )
    if "dcp-async-process" in methods:
        slots = plan.memory.host_bytes_per_node or 0
        needed, free = slots + spec.cluster.workers_per_node * state, shutil.disk_usage(TMPFS).free
        if needed > free:
            raise Refused(
                Code.MISSING_RESOURCE,
                f"dcp-async-process hands each rank's whole state over through {TMPFS}: with dtrain's snapshots that "
                f"takes {needed:,} bytes there, free are {free:,}; leave it out (--methods …)",
            )


def _sweep(home: Path) -> None:
    """Remove what a benchmark left that was killed outright: nobody holds its lock any more."""
    for path in home.glob(f"{PREFIX}*"):
        run = RunDir(path)
        with suppress(OSError, Locked):
            if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > YOUNG_S:
                with FileLock(run.lock):
                    _remove(run)


def _remove(run: RunDir) -> None:
    memory_dir(run).remove()
    shutil.rmtree(run.root, ignore_errors=True)
