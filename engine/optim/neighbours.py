"""Small weights, and what an optimizer keeps of them, laid side by side in memory in the order of a snapshot.

Each tensor has memory of its own, somewhere. Thousands of them, a few dozen bytes each, have left the processor's
caches when a snapshot looks at them after an update, and each costs a wait for memory. Measured for 3,000 weights of
64 bytes with what AdamW keeps of them (`tests.benchmarks.many`, one busy core): the training thread takes 1.2 to
1.6 ms of processor time for the boundary of a step instead of 2.9.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...planners.packing import SMALL_BYTES
from ..layout import local_of

ALIGNMENT = 64
"""Bytes: weights begin where torch's own allocator would let them begin, so kernels compute with them as before."""


@torch.no_grad()
def lay_side_by_side(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Move small tensors in host memory whose memory nobody else uses; each stays the same object, the same numbers.

    What is not moved and stands between them in a snapshot (a large tensor, another dtype) ends a row of neighbours.
    """
    parameters = list(model.parameters())
    _move([local_of(parameter) for parameter in parameters], ALIGNMENT)
    _move([local_of(kept) for p in parameters for kept in optimizer.state.get(p, {}).values()], 1)


def _move(tensors: list[Tensor], alignment: int) -> None:
    alone = _holders(torch.empty(1))
    row: list[Tensor] = []
    for tensor in tensors:
        moves = _is_small_and_whole(tensor) and _holders(tensor) == alone
        if row and not (moves and tensor.dtype == row[0].dtype):
            _move_row(row, alignment)
            row = []
        if moves:
            row.append(tensor)
    _move_row(row, alignment)


def _holders(tensor: Tensor) -> int:
    """How many there are of a tensor's memory: itself, this look at it, tensors and arrays that share it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _is_small_and_whole(tensor: Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return here and 0 < nbytes < SMALL_BYTES and nbytes == tensor.untyped_storage().nbytes()


def _move_row(row: list[Tensor], alignment: int) -> None:
    if len(row) < 2:
        return
    step = max(1, alignment // row[0].element_size())
    begins, end = [], 0
    for tensor in row:
        begins.append(-(-end // step) * step)
        end = begins[-1] + tensor.numel()
    together = torch.empty(end, dtype=row[0].dtype)
    for begin, tensor in zip(begins, row, strict=True):
        numbers = tensor.clone()
        tensor.set_(together.untyped_storage(), begin, tensor.shape, tensor.stride())
        tensor.copy_(numbers)
