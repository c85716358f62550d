"""What a script that starts a job has to know: from the spec, from its plan, and from the command's options."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ...planners.plan import Plan
from ...specs.models import Spec

LEAST_STOP_S = 120
SPARE_STOP_S = 30.0
"""Between a stop signal and the end of a job, beside what the plan knows of."""
PORT = 29500
SPARE_SHM = 64 * 2**20


@dataclass(frozen=True)
class Wanted:
    """The options of `dtrain launch`; None: not given."""

    nodes: str | None = None
    time: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    image: str | None = None
    claim: str | None = None
    hostfile: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Job:
    """A job to be started."""

    spec_path: Path
    spec: Spec
    plan: Plan
    overrides: tuple[str, ...]
    wanted: Wanted
    program: str
    """The command `dtrain` as it was called here."""
    folder: Path
    """Where it was called: paths of the spec are relative to it."""

    @property
    def nodes(self) -> int:
        """Nodes of the job, the most that it may have."""
        return int(self.spec.cluster.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of a node; with `cluster.device: auto` none, unless they were asked for."""
        if self.wanted.gpus_per_node is not None:
            return self.wanted.gpus_per_node
        return self.spec.cluster.workers_per_node if self.spec.cluster.device == "cuda" else 0

    @property
    def gpu_words(self) -> str | None:
        """What is to be said where nobody has told whether there are GPUs."""
        if self.wanted.gpus_per_node is None and self.spec.cluster.device == "auto":
            return "no GPU is asked for: cluster.device is auto; dtrain launch --gpus-per-node N asks for them"
        return None

    @property
    def stop_s(self) -> int:
        """Seconds that the job may need from a stop signal to its end, with its newest step stored."""
        slow = [tier.write_s for tier in self.plan.tiers if tier.type != "memory" and tier.write_s is not None]
        return max(LEAST_STOP_S, math.ceil(self.spec.cluster.shutdown_timeout + max(slow, default=0.0) + SPARE_STOP_S))

    @property
    def shm_bytes(self) -> int | None:
        """Room that the snapshots of a node need in /dev/shm; None: the plan does not know."""
        slots = self.plan.memory.slot_bytes_per_node
        return None if slots is None else slots + slots // 20 + SPARE_SHM

    @property
    def name(self) -> str:
        """Of the spec, in letters that every scheduler takes."""
        return re.sub("[^a-z0-9]+", "-", self.spec.name.lower()).strip("-")[:40].rstrip("-") or "dtrain"

    def command(self, spec: str, program: str | None = None) -> list[str]:
        """Words that start the job, or go on with it, on each node; its place is not among them."""
        return [program or self.program, "run", "--or-resume", spec, *self.overrides]


def quoted(words: list[str]) -> str:
    """A line of shell."""
    return " ".join(shlex.quote(word) for word in words)
