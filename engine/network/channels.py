"""The storage channel: a process group of its own, on a network interface of its own where the spec names one.

Made by its constructor: torch's `new_group` takes options for gloo and leaves them unread (2.13), so the group would
share the compute channel's interface without a word.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

STORAGE_INTERFACE = "DTRAIN_STORAGE_INTERFACE"
"""Told to the workers of a run on several nodes by their launcher."""


class StorageChannel:
    """Carries bytes of checkpoints between ranks; tensors are on the CPU."""

    def __init__(self, store: Store, rank: int, world: int, interface: str, timeout: timedelta) -> None:
        """Connect over this interface; all ranks must call it."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(interface=interface)]
        options._timeout = timeout
        self._group = ProcessGroupGloo(store, rank, world, options)

    def broadcast(self, tensor: Tensor, giver: int) -> None:
        """Give all ranks what one has; all of them must call it."""
        self._group.broadcast(tensor, giver).wait()  # type: ignore[attr-defined]

    def send(self, tensor: Tensor, taker: int) -> None:
        """Give one rank what we have."""
        self._group.send([tensor], taker, 0).wait()  # type: ignore[attr-defined]

    def receive(self, tensor: Tensor, giver: int) -> None:
        """Take what another rank sends."""
        self._group.recv([tensor], giver, 0).wait()  # type: ignore[attr-defined]


def storage_channel(rank: int, world: int, timeout: timedelta) -> StorageChannel | None:
    """The channel of this run; all ranks must call it. None on one node: what they exchange there is in memory."""
    interface = os.environ.get(STORAGE_INTERFACE)
    if interface is None:
        return None
    return StorageChannel(PrefixStore("dtrain/storage", _get_default_store()), rank, world, interface, timeout)
