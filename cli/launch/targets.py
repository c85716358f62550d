"""What starts a job on several nodes, by name."""

from __future__ import annotations

from enum import StrEnum


class Starter(StrEnum):
    """What `dtrain launch` writes for."""

    SLURM = "slurm"
    K8S = "k8s"
    SSH = "ssh"
