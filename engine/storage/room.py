"""Is there room for the checkpoints? Bytes and files of every file system that a slower tier lies on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...planners.plan import Plan
from ...planners.schedule import files_each, held_at_most
from ...specs.models import Spec
from ...specs.places import DiskTier, ObjectTier
from ...tiers.format.layout import RunDir, parse_version, unfinished
from ...tiers.reading.places import place_of
from ...tiers.stores.access import nearest, unusable
from ...tiers.stores.store import StoreError, open_store

RANK_BYTES, TENSOR_BYTES = 16 * 2**10, 512
"""Beside the state: random states and padding of each rank, names and digests of each tensor. About 14 KiB and 370
bytes were seen."""
BLOCK = 512
"""Unit of st_blocks, in bytes."""
OWN_FILES = 4
"""Beside checkpoints: the tier's folder, the fence's with its claim, and the mark of the checkpoint being written."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one answer holds: reasons not to begin, and reasons why the run may not get to its end."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Amount:
    """Bytes and files."""

    nbytes: int
    files: int

    def __add__(self, other: _Amount) -> _Amount:
        return _Amount(self.nbytes + other.nbytes, self.files + other.files)

    def __sub__(self, other: _Amount) -> _Amount:
        return _Amount(max(0, self.nbytes - other.nbytes), max(0, self.files - other.files))

    def more_than(self, free: _Free) -> str:
        """What is not there, with figures; empty if all of it is."""
        short = []
        if self.nbytes > free.nbytes:
            short.append(f"{self.nbytes:,} bytes, free are {free.nbytes:,}")
        if free.files is not None and self.files > free.files:
            short.append(f"{self.files:,} files, free are {free.files:,}")
        return " and ".join(short)


@dataclass(frozen=True, slots=True)
class _Free:
    """What a file system has for us; it may not know a number of files."""

    nbytes: int
    files: int | None


@dataclass(frozen=True, slots=True)
class _Need:
    """A tier in a folder: where, and what it takes."""

    tier: str
    folder: Path
    device: int
    one: _Amount
    """One checkpoint more."""
    most: _Amount
    """All that is there at most."""
    held: _Amount
    """What its checkpoints take now."""
    leftovers: _Amount
    """Unfinished ones, deleted when the run begins."""


def check_room(spec: Spec, plan: Plan, run: RunDir) -> Room:
    """Look at every slower tier of a run; one that shares a file system with another shares its room, too."""
    problems: list[str] = []
    needs: list[_Need] = []
    for tier in spec.slow_tiers:
        folder = _folder(tier, run)
        if folder is None:
            problems += _cannot_open(tier, run)
            continue
        existing = nearest(folder)
        if (why := unusable(folder)) is not None:
            key = "path" if isinstance(tier, DiskTier) else "url"
            problems.append(f"the {tier.type} tier's folder {folder} cannot be used: {why}; give another {key}")
        elif plan.model.state_bytes is not None:
            beside = RANK_BYTES * spec.world_size + TENSOR_BYTES * (plan.model.tensors or 0)
            one = _Amount(plan.model.state_bytes + beside, files_each(tier, spec.world_size))
            needs.append(_need(tier, one, held_at_most(tier, spec.max_steps), folder, existing))
    warnings: list[str] = []
    for group in _by_device(needs):
        begin, end = _compare(group)
        problems += begin
        warnings += end
    return Room(tuple(problems), tuple(warnings))


def _by_device(needs: list[_Need]) -> list[list[_Need]]:
    groups: dict[int, list[_Need]] = {}
    for need in needs:
        groups.setdefault(need.device, []).append(need)
    return list(groups.values())


def _folder(tier: DiskTier | ObjectTier, run: RunDir) -> Path | None:
    """The folder a tier lies in; None for a bucket."""
    if isinstance(tier, DiskTier):
        return run.disk(tier.path)
    return Path(tier.url.removeprefix("file://")) if tier.url.startswith("file://") else None


def _cannot_open(tier: DiskTier | ObjectTier, run: RunDir) -> Iterator[str]:
    """Say why a bucket cannot even be tried; whether it answers is asked elsewhere."""
    try:
        open_store(place_of(tier, run), run.spool)
    except StoreError as error:
        yield f"the {tier.type} tier cannot be used: {error}"


def _need(tier: DiskTier | ObjectTier, one: _Amount, most: int, folder: Path, existing: Path) -> _Need:
    """Look at what is there of a tier that takes `one` for a checkpoint and holds `most` of them."""
    held, leftovers = _Amount(0, 0), _Amount(0, 0)
    for entry in folder.iterdir() if existing == folder else ():
        if parse_version(entry.name) is not None:
            held += _taken(entry)
        elif unfinished(entry.name) is not None:
            leftovers += _taken(entry)
    own = _Amount(0, OWN_FILES)
    peak = _Amount(most * one.nbytes, most * one.files)
    return _Need(tier.type, folder, existing.stat().st_dev, one + own, peak + own, held, leftovers)


def _taken(folder: Path) -> _Amount:
    """What a folder and its files take; what goes away meanwhile takes nothing."""
    total = _Amount(0, 1)
    try:
        for entry in os.scandir(folder):
            total += _Amount(entry.stat(follow_symlinks=False).st_blocks * BLOCK, 1)
    except OSError:
        pass
    return total


def _compare(needs: list[_Need]) -> tuple[list[str], list[str]]:
    """Compare what the tiers of one file system take with what is free there."""
    nothing = _Amount(0, 0)
    one, most = sum((need.one for need in needs), nothing), sum((need.most for need in needs), nothing)
    held = sum((need.held for need in needs), nothing)
    where = nearest(needs[0].folder)
    free = _free(where, sum((need.leftovers for need in needs), nothing))
    who = " and ".join(f"the {need.tier} tier in {need.folder}" for need in needs)
    verb = "needs" if len(needs) == 1 else "need"
    short = one.more_than(free)
    if short:
        which = "one checkpoint" if len(needs) == 1 else "one checkpoint each"
        return [f"{who} {verb} room for {which}: {short}; {_remedy(needs)}"], []
    rest = most - held
    short = _Amount(max(rest.nbytes, one.nbytes), max(rest.files, one.files)).more_than(free)
    if short:
        return [], [f"{who} {verb} more room before the run is over: {short}; {_remedy(needs)}, or keep fewer"]
    return [], []


def _remedy(needs: list[_Need]) -> str:
    keys = " or ".join("path" if need.tier == "disk" else "url" for need in needs)
    return f"free some, or give another {keys}"


def _free(folder: Path, leftovers: _Amount) -> _Free:
    """What is free for us, with what is about to be deleted; file systems without inode tables count no files."""
    info = os.statvfs(folder)
    files = info.f_favail + leftovers.files if info.f_files else None
    return _Free(info.f_bavail * info.f_frsize + leftovers.nbytes, files)
