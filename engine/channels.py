"""The storage channel: a process group of its own, on a network interface of its own where the spec names one."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

STORAGE_INTERFACE = "DTRAIN_STORAGE_INTERFACE"
"""Told to the workers of a run on several nodes by their launcher."""


def storage_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """The group for checkpoints; all ranks must call it. None on one node: what they exchange there is in memory."""
    interface = os.environ.get(STORAGE_INTERFACE)
    if interface is None:
        return None
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = timeout
    group = dist.new_group(backend="gloo", timeout=timeout, pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group
