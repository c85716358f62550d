"""What this machine has, found without torch and in well under a second."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..planners.devices import ACCELERATORS
from ..planners.machine import Machine
from ..specs.models import Spec
from .core import Core, look_at_core

SHM = Path("/dev/shm")
NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
NVIDIA_DEVICE = Path("/dev/nvidia0")
AMD_DEVICE = Path("/dev/kfd")
NVIDIA_SMI_TIMEOUT_S = 1.0
ASSUMED_GPU = "h100"
"""Planned for when the spec asks for cuda and this machine has none."""
UNKNOWN_GPU = "a100"
"""Planned for when this machine's GPU is not in the table."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The accelerator to plan for, how many are here, and what was assumed."""

    accelerator: str
    count: int = 0
    assumed: tuple[str, ...] = ()


def this_machine(spec: Spec, *, look: bool = True) -> Machine:
    """Describe this machine as a node of the cluster; `cluster.accelerator` and `cluster.device` win.

    Planned for an accelerator that is not here, the job runs elsewhere: then this machine's memory says nothing.
    Planned for a CPU, what a core of this machine does is looked at for a fraction of a second, unless `look` is
    false or the spec gives both figures.
    """
    choice = choose_accelerator(spec)
    elsewhere = choice.accelerator != "cpu" and choice.count == 0
    given = spec.cluster.hardware
    look = look and choice.accelerator == "cpu" and "auto" in (given.flops, given.memory_bandwidth)
    core = look_at_core() if look else Core()
    return Machine(
        cpu_cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=None if elsewhere else psutil.virtual_memory().total,
        shm_free_bytes=None if elsewhere else shm_free_bytes(SHM),
        accelerator=choice.accelerator,
        core_flop_per_s=core.flop_per_s,
        core_traffic_bytes_per_s=core.traffic_bytes_per_s,
        accelerator_count=choice.count,
        assumed=choice.assumed,
        omp_threads=omp_threads(os.environ.get("OMP_NUM_THREADS", "")),
    )


def omp_threads(given: str) -> int | None:
    """Return the threads of the outermost level that OMP_NUM_THREADS asks for; None where it asks for none."""
    first = given.partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def choose_accelerator(spec: Spec) -> Choice:
    """Return the accelerator to plan for; looks for GPUs unless the spec says cpu."""
    cluster = spec.cluster
    if cluster.accelerator == "cpu" or (cluster.accelerator == "auto" and cluster.device == "cpu"):
        return Choice("cpu")
    found = nvidia_gpus()
    if cluster.accelerator != "auto":
        return _given(cluster.accelerator, found)
    if found:
        return _known(found)
    if cluster.device == "cuda":
        return Choice(ASSUMED_GPU, 0, (f"no GPU here: planned for {ASSUMED_GPU}; cluster.accelerator names another",))
    return Choice("cpu")


def nvidia_gpus() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs, from the driver's files or from `nvidia-smi -L`."""
    names = [_model_line(path) for path in sorted(NVIDIA_PROC.glob("*/information"))]
    known = [name for name in names if name]
    if known:
        return known
    command = shutil.which("nvidia-smi")
    if command is None or not NVIDIA_DEVICE.exists():
        return []
    try:
        listing = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listing.stdout, re.MULTILINE)


def has_gpu() -> bool:
    """Tell whether this machine has any GPU that torch might run on, in the table or not."""
    return bool(nvidia_gpus()) or AMD_DEVICE.exists()


def table_name(gpu: str) -> str | None:
    """Return the planner's name of a GPU, or None: `NVIDIA H100 80GB HBM3` is `h100`."""
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    return next((name for name in ACCELERATORS if name in words), None)


def shm_free_bytes(path: Path) -> int | None:
    """Return the free bytes of the tmpfs at `path`, or None where there is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _given(accelerator: str, found: list[str]) -> Choice:
    count = sum(table_name(gpu) == accelerator for gpu in found)
    note = f"this machine has no {accelerator}: memory of the node is not checked"
    return Choice(accelerator, count, () if count else (note,))


def _known(found: list[str]) -> Choice:
    name = table_name(found[0])
    if name is not None:
        return Choice(name, len(found))
    note = f"{found[0]} is not in the table: planned for {UNKNOWN_GPU} (use --profile or cluster.accelerator)"
    return Choice(UNKNOWN_GPU, len(found), (note,))


def _model_line(path: Path) -> str:
    """Return the `Model:` of one GPU in the driver's files, or an empty text."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
    return match[1] if match else ""
