"""Is everything there that the run needs? Asked before a worker starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import torch

from ..planners.plan import Plan
from ..specs.models import Spec
from ..tiers.format.layout import RunDir
from ..tiers.memory.replicas import REPLICA_SLOTS
from ..tiers.memory.slots import PEER_SLOTS, SLOTS, TMPFS, MemoryDir
from .storage.room import check_room

OWN_FILES, RANK_FILES = 8, 12
"""In memory: the folder, its owner, the drainer's files; the counter of a rank, and what it has of three slots."""


class MissingResource(Exception):
    """A device, memory or disk that the run needs is not there; the message says what and how much."""


def preflight(spec: Spec, plan: Plan, run: RunDir, memory: MemoryDir) -> tuple[str, ...]:
    """Raise MissingResource with everything that is missing, each with figures and a remedy.

    Returns what will be missing before the run is over, though it can begin.
    """
    room = check_room(spec, plan, run)
    problems = [*_devices(spec), *_memory(spec, plan, memory), *room.problems]
    if problems:
        raise MissingResource("\n".join(problems))
    return room.warnings


def _devices(spec: Spec) -> Iterator[str]:
    if spec.cluster.device == "cuda" and not torch.cuda.is_available():
        yield "cluster.device is cuda, but torch finds no CUDA device here; use device: auto or cpu"
        return
    wants_cuda = spec.cluster.device == "cuda" or (spec.cluster.device == "auto" and torch.cuda.is_available())
    if wants_cuda and torch.cuda.device_count() < spec.cluster.workers_per_node:
        yield (
            f"cluster.workers_per_node is {spec.cluster.workers_per_node}, "
            f"but there are {torch.cuda.device_count()} CUDA devices here"
        )


def _names(spec: Spec) -> Iterator[str]:
    """Counters, slots with their records and marks are files; a tmpfs has room for so many and no more."""
    needed = OWN_FILES + RANK_FILES * spec.cluster.workers_per_node
    info = os.statvfs(TMPFS)
    if info.f_files and info.f_favail < needed:
        yield (
            f"snapshots need {needed} files in {TMPFS}, free are {info.f_favail}; "
            f"make room for more (mount -o remount,nr_inodes=… {TMPFS})"
        )


def _memory(spec: Spec, plan: Plan, memory: MemoryDir) -> Iterator[str]:
    if not TMPFS.is_dir():
        return  # who makes the folder there says so
    yield from _names(spec)
    if not spec.used_tiers or plan.model.state_bytes is None:
        return
    replicas = spec.peer_tier.replicas if spec.peer_tier is not None else 0
    slots = SLOTS + (PEER_SLOTS + REPLICA_SLOTS * replicas if replicas else 0)
    needed = slots * plan.model.state_bytes // min(spec.usable_nodes)
    held = sum(file.stat().st_blocks * 512 for file in memory.path.rglob("*")) if memory.path.is_dir() else 0
    free = shutil.disk_usage(TMPFS).free + held
    if needed > free:
        yield (
            f"snapshots need {needed:,} bytes in {TMPFS} ({slots} slots), free are {free:,}; "
            f"make it larger (mount -o remount,size=… {TMPFS}) or train without tiers (tiers=[])"
        )
