"""What may change in a forward pass, and is therefore taken at the step boundary, before the first window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...planners.sharding.shards import TensorInfo
from .copier import Item
from .state import StateError, TrainState, infos, random_states, tensor_bytes


class Boundary:
    """The random states of every rank, and the buffers of the rank that leads, in this layout: buffers come first."""

    def __init__(self, state: TrainState, device: torch.device, offset: int, *, leads: bool, aside: bool) -> None:
        """Lay them out from `offset` of the slot's data on.

        With `aside` buffers are in the memory of a device: they are put aside there, and copied with the items.
        """
        self.state, self.device, self.leads, self.offset = state, device, leads, offset
        self.buffers = infos(self._buffers())
        self.infos = [*self.buffers, *(TensorInfo(name, "U8", (len(data),)) for name, data in self._states())]
        self._aside: list[Tensor] | None = None
        if aside:
            self._aside = [torch.empty(b.shape, dtype=b.dtype, device=b.device) for b in self._buffers().values()]

    def take(self, write: Callable[[int, bytes | memoryview], None]) -> tuple[list[Item], list[tuple[int, int]]]:
        """Take all of it now; raises StateError for a buffer that is not as it was at the start.

        Returns what is left to be copied, and begin and end of each entry after that, which was written there and then.
        """
        buffers = self._checked()
        position, items, spans = self.offset, list[Item](), list[tuple[int, int]]()
        if self._aside is not None:
            if self._aside:
                torch._foreach_copy_(self._aside, list(buffers.values()))
            for info, aside in zip(self.buffers, self._aside, strict=True):
                items.append(Item(aside, 0, info.nbytes, position))
                position += info.nbytes
            buffers = {}
        data: list[bytes | memoryview] = [*map(tensor_bytes, buffers.values()), *(data for _, data in self._states())]
        for one in data:
            write(position, one)
            spans.append((position, position + len(one)))
            position += len(one)
        return items, spans

    def _states(self) -> list[tuple[str, bytes]]:
        return list(random_states(self.device).items())

    def _buffers(self) -> dict[str, Tensor]:
        return self.state.changing() if self.leads else {}

    def _checked(self) -> dict[str, Tensor]:
        buffers = self._buffers()
        found = infos(buffers)
        for before, now in zip(self.buffers, found, strict=False):
            if before != now:
                raise StateError(f"{before.name} was {_words(before)} and is {_words(now)} now; it cannot be stored")
        if len(found) != len(self.buffers):
            raise StateError("the model has other buffers than at the start; they cannot be stored")
        return buffers


def _words(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"
