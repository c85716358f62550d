"""What the copy of a state needs of the device that holds it: marks in the order of its work, and a side stream.

A device does what it is handed in the order of a stream, and later than the thread that hands it over goes on. So
neither "the update is done" nor "this slice is copied" is something that thread knows: it puts marks between pieces of
work, and has one stream wait for the mark of another. Whoever needs the bytes themselves waits for a mark on a thread
of its own.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from .packs import Pack

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process, as torch's own page-locked memory is."""


class PagesError(Exception):
    """Memory cannot be page-locked, or let go of; the message says what the driver says."""


class Mark(Protocol):
    """A point in the order of a stream's work."""

    def synchronize(self) -> None:
        """Wait on this thread, without its core, until the device has got there."""

    def query(self) -> bool:
        """Tell whether it has."""


class Side(Protocol):
    """A stream of copies beside that on which the calling thread has its work done.

    Only `Mark.synchronize` and `finish` wait; all else hands over work and returns.
    """

    def enter(self) -> None:
        """Called once by a thread that is to hand over copies."""

    def computed(self) -> Mark:
        """The end of all that the calling thread has handed over to be computed so far."""

    def follow(self, mark: Mark) -> None:
        """What is handed to the side stream from now on begins after `mark`."""

    def hold(self, mark: Mark) -> None:
        """What the calling thread hands over to be computed from now on begins after `mark`."""

    def fill(self, pack: Pack) -> None:
        """Put small tensors together, on the side stream."""

    def rows(self, tensor: Tensor) -> Tensor:
        """The row-major bytes of a tensor: its own memory, or a copy made on the side stream."""

    def copy(self, source: Tensor, begin: int, nbytes: int, target: int) -> None:
        """Copy `nbytes` from byte `begin` of such bytes on to the page-locked address `target`."""

    def copied(self) -> Mark:
        """The end of all that was handed to the side stream so far."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between two marks of the side stream that the device has passed."""

    def finish(self) -> None:
        """Wait on this thread until the side stream is empty."""

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that the device writes into it by itself; raises PagesError."""

    def unlock(self, address: int) -> None:
        """Let go of it; raises PagesError."""


class CudaSide(Side):
    """A CUDA stream of the lowest priority. Never run on a GPU so far; see docs/status.md.

    The lowest priority is that of the stream on which torch computes unless told otherwise (0): it decides between the
    few kernels of the side stream and those of the training. The copies themselves are done by a copy engine.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream on this device."""
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method; its stub says otherwise
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=lowest)

    def enter(self) -> None:
        """A new thread works for device 0, and would make a context there."""
        torch.cuda.set_device(self.device)

    def computed(self) -> Mark:
        """An event on the current stream."""
        return _event(torch.cuda.current_stream(self.device))

    def follow(self, mark: Mark) -> None:
        """By cudaStreamWaitEvent."""
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)

    def hold(self, mark: Mark) -> None:
        """By cudaStreamWaitEvent."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(mark)

    def fill(self, pack: Pack) -> None:
        """By kernels on the side stream."""
        with torch.cuda.stream(self.stream):
            pack.fill()

    def rows(self, tensor: Tensor) -> Tensor:
        """A copy belongs to the side stream's part of torch's allocator, so nobody else gets its memory too early."""
        with torch.cuda.stream(self.stream):
            return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    def copy(self, source: Tensor, begin: int, nbytes: int, target: int) -> None:
        """By cudaMemcpyAsync, which returns at once since the target is page-locked."""
        there = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(target), dtype=torch.uint8)
        with torch.cuda.stream(self.stream):
            there.copy_(source[begin : begin + nbytes], non_blocking=True)

    def copied(self) -> Mark:
        """An event on the side stream."""
        return _event(self.stream)

    def seconds(self, first: Mark, last: Mark) -> float:
        """As the device's clock has it."""
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last)) / 1000

    def finish(self) -> None:
        """By cudaStreamSynchronize."""
        self.stream.synchronize()

    def lock(self, address: int, nbytes: int) -> None:
        """By cudaHostRegister."""
        _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE))

    def unlock(self, address: int) -> None:
        """By cudaHostUnregister."""
        _check(torch.cuda.cudart().cudaHostUnregister(address))


def side_of(device: torch.device) -> CudaSide | None:
    """The side stream for a state on `device`; None where it is in host memory, and a thread copies it."""
    return CudaSide(device) if device.type == "cuda" else None


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def _check(error: int) -> None:
    """torch's own check_error compares with a member of an enumeration, and so takes the number of success for none."""
    if int(error) != 0:
        raise PagesError(str(torch.cuda.CudaError(int(error))))
