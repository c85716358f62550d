"""From the spec's dataset block to batches; the position in the data is one number."""

from __future__ import annotations

from typing import Any, Protocol

import xxhash
from torch.utils.data import default_collate

from ...specs.datasets import Dataset, JsonlDataset, TextDataset, TokensDataset
from ...specs.models import Evaluation, GptModel, Spec
from ..entry import UserCodeError, call_entry
from .order import samples_at
from .text import DataError, TextData, TokenData
from .tokens import BinaryData, JsonlData


class Samples(Protocol):
    """What a data set must have."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample."""


def build_data(spec: Spec) -> tuple[Samples, Samples | None]:
    """Open what is trained on, and what is evaluated on if anything is; raises DataError or UserCodeError."""
    vocab_size = spec.model.vocab_size if isinstance(spec.model, GptModel) else None
    samples = build_samples(spec.dataset, vocab_size=vocab_size)
    if spec.evaluation is None:
        return samples, None
    if spec.evaluation.dataset is None:
        assert isinstance(samples, TokenData)  # the spec is refused else
        return samples.split(spec.evaluation.held_out)
    own = build_samples(spec.evaluation.dataset, "evaluation.dataset", vocab_size)
    if isinstance(samples, TokenData) and isinstance(own, TokenData):
        _refuse_shared(samples, own)
    return samples, own


def _refuse_shared(trained: TokenData, held_out: TokenData) -> None:
    """Raise DataError for a file that is both trained on and evaluated on."""
    shared = {file.resolve() for file in trained.files} & {file.resolve() for file in held_out.files}
    if shared:
        raise DataError(
            f"evaluation.dataset.path {held_out.path!r}: {min(shared)} is trained on, too (dataset.path "
            f"{trained.path!r}); move it out of there, or leave evaluation.dataset out: a part of the data is held out"
        )


def build_samples(spec: Dataset, key: str = "dataset", vocab_size: int | None = None) -> Samples:
    """Open one data set; raises DataError or UserCodeError, which name the spec's block `key`."""
    if isinstance(spec, TextDataset):
        return TextData(spec.path, spec.seq_len, key)
    if isinstance(spec, JsonlDataset):
        return JsonlData(spec.path, spec.seq_len, spec.field, key)
    if isinstance(spec, TokensDataset):
        return BinaryData(spec.path, spec.seq_len, spec.dtype, vocab_size, key)
    samples = call_entry(spec.entry, spec.kwargs, f"{key}.entry")
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise UserCodeError(
            f"{key}.entry {spec.entry} returned {type(samples).__name__}, it must have __len__ and __getitem__"
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
        if isinstance(self.samples, TokenData):
            return self.samples.fingerprint()
        return xxhash.xxh3_128_hexdigest(str(self.size).encode())


class HeldOut:
    """The micro-batches that every evaluation takes: the same samples whatever the world size and the step."""

    def __init__(self, samples: Samples, spec: Evaluation, *, seed: int, micro_batch: int) -> None:
        """Choose the samples; raises DataError when there are fewer than an evaluation takes."""
        self.samples, self.seed, self.batches, self.micro_batch = samples, seed, spec.batches, micro_batch
        size, needed = len(samples), spec.batches * micro_batch
        if size < needed:
            raise DataError(
                f"evaluation: {size} samples to evaluate on are fewer than batches * micro_batch_size = "
                f"{spec.batches} * {micro_batch} = {needed}; {_remedy(spec, size, micro_batch)}"
            )

    def get(self, number: int) -> Any:
        """Micro-batch `number`."""
        ids = samples_at(number * self.micro_batch, self.micro_batch, len(self.samples), self.seed)
        return default_collate([self.samples[index] for index in ids])


def _remedy(spec: Evaluation, size: int, micro_batch: int) -> str:
    fewer = f"use evaluation.batches={size // micro_batch}" if size >= micro_batch else ""
    if spec.dataset is not None:
        return " or ".join(filter(None, (fewer, "give more data")))
    return " or ".join(filter(None, (fewer, f"hold out more than {spec.held_out:.3g} with evaluation.fraction=…")))
