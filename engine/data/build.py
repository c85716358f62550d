"""From the spec's dataset block to batches; the position in the data is one number."""

from __future__ import annotations

from typing import Any, Protocol

import xxhash
from torch.utils.data import default_collate

from ...specs.models import PythonDataset, TextDataset
from ..entry import UserCodeError, call_entry
from .order import samples_at
from .text import DataError, TextData


class Samples(Protocol):
    """What a data set must have."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample."""


def build_samples(spec: TextDataset | PythonDataset) -> Samples:
    """Open the data set; raises DataError or UserCodeError."""
    if isinstance(spec, TextDataset):
        return TextData(spec.path, spec.seq_len)
    samples = call_entry(spec.entry, spec.kwargs, "dataset.entry")
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise UserCodeError(
            f"dataset.entry {spec.entry} returned {type(samples).__name__}, it must have __len__ and __getitem__"
        )
    checked: Samples = samples
    return checked


class Batches:
    """Micro-batches of one rank, as a function of the step alone.

    A step takes the next `global_batch` samples of the endless stream; within it, micro-batch m of rank r takes those
    from m · (world · micro_batch) + r · micro_batch on, so the samples of a step are the same for every world size.
    """

    def __init__(
        self, samples: Samples, *, seed: int, global_batch: int, micro_batch: int, rank: int, world: int
    ) -> None:
        """Prepare for one rank; raises DataError when the data is smaller than one global batch."""
        self.samples, self.size, self.seed = samples, len(samples), seed
        self.global_batch, self.micro_batch, self.rank, self.world = global_batch, micro_batch, rank, world
        if self.size < global_batch:
            raise DataError(
                f"the data set has {self.size} samples, fewer than training.global_batch_size {global_batch}: "
                "a step would see a sample twice; give more data or a smaller batch"
            )

    def sample_ids(self, seen: int, micro: int) -> list[int]:
        """Which samples this rank takes in pass `micro` of the step that begins after `seen` samples."""
        first = seen + (micro * self.world + self.rank) * self.micro_batch
        return samples_at(first, self.micro_batch, self.size, self.seed)

    def get(self, seen: int, micro: int) -> Any:
        """The batch of those samples."""
        return default_collate([self.samples[index] for index in self.sample_ids(seen, micro)])

    def fingerprint(self) -> str:
        """A hash that changes when the data set does (for `python` data: its length only)."""
        if isinstance(self.samples, TextData):
            return self.samples.fingerprint()
        return xxhash.xxh3_128_hexdigest(str(self.size).encode())
