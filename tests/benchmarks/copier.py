"""What the look for NaN and infinity costs the copier: seconds per GiB with and without it, in alternating blocks.

    python -m tests.benchmarks.copier [MiB] [slice bytes]

The state is that of AdamW: weights and first moments of both signs, second moments of one. Time is the processor's, so
that neighbours on the machine disturb less; the ratio is the median over pairs of blocks that follow each other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import time

import torch

from dtrain.engine.process import streaming
from dtrain.engine.snapshot.copier import Copier, HostMover, Item
from dtrain.engine.snapshot.finite import FLOATS, Floats

PAIRS = 20


def main(mib: int = 768, slice_bytes: int = 2**20) -> None:
    """Print both times and their ratio."""
    torch.set_num_threads(1)
    count = mib * 2**20 // 12
    tensors = (torch.randn(count), torch.randn(count) * 1e-3, torch.rand(count) * 1e-6)
    copier = Copier(HostMover(), slice_bytes)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    target = shared_memory(12 * count)
    base = ctypes.addressof(ctypes.c_char.from_buffer(target))
    for pair in range(PAIRS + 1):
        for checked in (False, True) if pair % 2 else (True, False):
            floats: Floats | None = FLOATS["F32"] if checked else None
            items = [Item(tensor, 0, 4 * count, 4 * count * n, floats) for n, tensor in enumerate(tensors)]
            started = time.process_time()
            copier.begin(pair, items, base, lambda digests: None)
            copier.finish()
            seconds[checked].append((time.process_time() - started) / (12 * count / 2**30))
    copier.stop()
    without, with_ = seconds[False][1:], seconds[True][1:]  # the first pair warms up
    ratio = statistics.median(b / a for a, b in zip(without, with_, strict=True))
    words = f"{statistics.median(without):.3f} s/GiB without, {statistics.median(with_):.3f} with"
    sys.stdout.write(f"{words}; median ratio {ratio:.3f}\n")


def shared_memory(nbytes: int) -> mmap.mmap:
    """Touched pages of tmpfs, as a slot has; they go away with the process."""
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(descriptor, 0, nbytes)
    mapped = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(descriptor)
    return mapped


if __name__ == "__main__":
    if as_worker := streaming(os.environ):  # read by the C library when a process starts
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.benchmarks.copier", *sys.argv[1:]], os.environ | as_worker
        )
    main(*map(int, sys.argv[1:3]))
