"""Sizes of the families of models that the planner can count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .block import Block
from .units import PositiveInt, WholeNumber

Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Ten times the deepest transformer published (DeepNet, arXiv:2203.00555); each is some ten tensors to count."""


def ff_dim(d_model: int, activation: str) -> int:
    """Hidden width of an MLP unless another is given: 4·d_model for gelu, 8/3·d_model rounded up to 64 for swiglu."""
    return 4 * d_model if activation == "gelu" else -(-(8 * d_model) // (3 * 64)) * 64


class Decoder(Block):
    """Sizes of a llama-style decoder."""

    n_layers: Layers
    """Number of transformer blocks."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_heads: PositiveInt
    """Attention heads; `d_model` must be divisible by it, and the head size must be even."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); default: `n_heads`."""
    d_ff: PositiveInt | None = None
    """Hidden width of the MLP; default: 4·d_model for gelu, 8/3·d_model rounded up to 64 for swiglu."""
    vocab_size: PositiveInt
    """Tokens in the vocabulary."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """The MLP's non-linearity."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which residual branches are dropped, per element."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head too."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads in use."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def ff_dim(self) -> int:
        """Hidden width of the MLP in use."""
        return ff_dim(self.d_model, self.activation) if self.d_ff is None else self.d_ff


class DecoderShape(Decoder):
    """A decoder: causal attention, RMSNorm, no biases."""

    family: Literal["decoder"]
    """Kind of network."""
    seq_len: PositiveInt | None = None
    """Tokens per sample; default: the dataset's."""


class EncoderShape(Block):
    """A BERT-like encoder that is trained to fill in masked tokens; attention looks both ways."""

    family: Literal["encoder"]
    """Kind of network."""
    n_layers: Layers
    """Number of transformer blocks."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_heads: PositiveInt
    """Attention heads; `d_model` must be divisible by it."""
    d_ff: PositiveInt | None = None
    """Hidden width of the MLP; default: 4·d_model."""
    vocab_size: PositiveInt
    """Tokens in the vocabulary."""
    max_positions: PositiveInt = 512
    """Rows of the table of learned positions."""
    token_types: WholeNumber = 2
    """Rows of the table of token types."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability with which residual branches are dropped, per element."""
    seq_len: PositiveInt | None = None
    """Tokens per sample; default: the dataset's."""

    @property
    def ff_dim(self) -> int:
        """Hidden width of the MLP in use."""
        return self.d_ff or 4 * self.d_model


class DiffusionShape(Block):
    """A diffusion transformer (DiT with adaLN-Zero) over patches of a square latent image."""

    family: Literal["diffusion"]
    """Kind of network."""
    n_layers: Layers
    """Number of transformer blocks."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_heads: PositiveInt
    """Attention heads; `d_model` must be divisible by it."""
    d_ff: PositiveInt | None = None
    """Hidden width of the MLP; default: 4·d_model."""
    input_size: PositiveInt = 32
    """Side of the latent image; a multiple of `patch_size`."""
    patch_size: PositiveInt = 2
    """Side of a patch; each patch is a token."""
    channels: PositiveInt = 4
    """Channels of the latent image; twice as many come out (noise and its variance)."""
    n_classes: WholeNumber = 1000
    """Labels to condition on, beside the one for none."""

    @property
    def ff_dim(self) -> int:
        """Hidden width of the MLP in use."""
        return self.d_ff or 4 * self.d_model

    @property
    def tokens(self) -> int:
        """Patches of one image."""
        return (self.input_size // self.patch_size) ** 2


Shape = DecoderShape | EncoderShape | DiffusionShape
