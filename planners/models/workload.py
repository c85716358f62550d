"""What the plan knows of a model whatever its family: tensors, operations, activations, tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...specs.datasets import TokenDataset
from ...specs.models import GptModel, Spec
from ...specs.shapes import DecoderShape, DiffusionShape, EncoderShape, Shape
from ..sharding.shards import TensorInfo
from . import diffusion, encoder, gpt

BACKWARD_TO_FORWARD = 2
"""FLOP of a backward pass per FLOP of its forward pass: each product has two gradients, one for its input and one
for its weight (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of a model of known family; without `tokens` per sample only its tensors are known."""

    model: GptModel | Shape
    samples: int
    tokens: int | None
    precision: str

    @cached_property
    def parameters(self) -> list[TensorInfo]:
        """Every parameter in the order of the module."""
        if isinstance(self.model, EncoderShape):
            found = encoder.parameters(self.model)
        elif isinstance(self.model, DiffusionShape):
            found = diffusion.parameters(self.model)
        else:
            found = gpt.parameters(self.model)
        return [replace(tensor, dtype="BF16") for tensor in found] if self.precision == "bf16" else found

    @property
    def forward_flop(self) -> int | None:
        """FLOP of one forward pass."""
        if self.tokens is None:
            return None
        if isinstance(self.model, EncoderShape):
            return encoder.forward_flop(self.model, self.samples, self.tokens)
        if isinstance(self.model, DiffusionShape):
            return diffusion.forward_flop(self.model, self.samples)
        return gpt.forward_flop(self.model, self.samples, self.tokens)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes that one forward pass keeps for its backward pass."""
        if self.tokens is None:
            return None
        if isinstance(self.model, EncoderShape):
            return encoder.activation_bytes(self.model, self.samples, self.tokens, self.precision)
        if isinstance(self.model, DiffusionShape):
            return diffusion.activation_bytes(self.model, self.samples, self.precision)
        return gpt.activation_bytes(self.model, self.samples, self.tokens, self.precision)


def workload(spec: Spec) -> Workload | None:
    """Return what the spec says of its model; None for a python model that it does not describe."""
    model = spec.model if isinstance(spec.model, GptModel) else spec.model.like
    if model is None:
        return None
    return Workload(model, spec.training.micro_batch_size, sample_tokens(spec), spec.training.precision)


def sample_tokens(spec: Spec) -> int | None:
    """Tokens per sample, or None when only the spec's own code knows.

    For a described model what its description says; else the dataset's `seq_len`, as key or among its `kwargs`.
    """
    shape = None if isinstance(spec.model, GptModel) else spec.model.like
    if isinstance(shape, DiffusionShape):
        return shape.tokens
    if isinstance(shape, DecoderShape | EncoderShape) and shape.seq_len is not None:
        return shape.seq_len
    if isinstance(spec.dataset, TokenDataset):
        return spec.dataset.seq_len
    seq_len = spec.dataset.kwargs.get("seq_len")
    return seq_len if isinstance(seq_len, int) and not isinstance(seq_len, bool) and seq_len > 0 else None
