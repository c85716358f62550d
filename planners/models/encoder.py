"""A BERT-like encoder in numbers: its tensors, its floating point operations, its activations.

Counted for masked-language training (Devlin et al. 2018, arXiv:1810.04805): learned positions, biases, LayerNorm,
GELU, and a head of one dense layer whose output matrix is the embedding's. Letters as in `gpt`.
"""

from __future__ import annotations

from ...specs.shapes import EncoderShape
from ..sharding.shards import TensorInfo
from .gpt import ELEMENT_BYTES


def parameters(model: EncoderShape) -> list[TensorInfo]:
    """Return every parameter, all fp32."""
    width, hidden = model.d_model, model.ff_dim
    tensors = [
        TensorInfo("embedding.tokens", "F32", (model.vocab_size, width)),
        TensorInfo("embedding.positions", "F32", (model.max_positions, width)),
        TensorInfo("embedding.types", "F32", (model.token_types, width)),
        *_norm("embedding.norm", width),
    ]
    for layer in range(model.n_layers):
        for name in ("query", "key", "value", "output"):
            tensors += _dense(f"layers.{layer}.attention.{name}", width, width)
        tensors += _norm(f"layers.{layer}.attention_norm", width)
        tensors += _dense(f"layers.{layer}.mlp.up", hidden, width) + _dense(f"layers.{layer}.mlp.down", width, hidden)
        tensors += _norm(f"layers.{layer}.mlp_norm", width)
    tensors += [*_dense("head.dense", width, width), *_norm("head.norm", width)]
    return [*tensors, TensorInfo("head.bias", "F32", (model.vocab_size,))]


def forward_flop(model: EncoderShape, samples: int, seq_len: int) -> int:
    """FLOP of one forward pass over `samples` of `seq_len` tokens.

    Per token 2 per weight in a matrix product, and 4·s·D per layer for scores and weighted values, for every token
    sees all s positions (Kaplan et al. 2020, arXiv:2001.08361, table 1, without its factor ½ for causal attention).
    The head is counted for every token, as implementations run that do not gather the masked ones first.
    """
    width = model.d_model
    layers = model.n_layers * (4 * width * width + 2 * width * model.ff_dim)
    head = width * width + model.vocab_size * width
    return samples * seq_len * (2 * (layers + head) + 4 * model.n_layers * seq_len * width)


def activation_bytes(model: EncoderShape, samples: int, seq_len: int, precision: str) -> int:
    """Estimate the bytes that one forward pass keeps for its backward pass; method and source as in `gpt`.

    Per token and layer: input and output of both norms 4·D, query, key, value and attention's output 4·D, MLP 2·F,
    two masks of D bytes with dropout. The head: 4·D and V logits with their fp32 log-soft-max and gradient.
    """
    element_bytes, width = ELEMENT_BYTES[precision], model.d_model
    per_layer = element_bytes * (8 * width + 2 * model.ff_dim) + (2 * width if model.dropout > 0 else 0)
    head = element_bytes * 4 * width + model.vocab_size * (element_bytes + 4 + 4)
    return samples * seq_len * (model.n_layers * per_layer + head)


def _dense(name: str, out: int, into: int) -> list[TensorInfo]:
    return [TensorInfo(f"{name}.weight", "F32", (out, into)), TensorInfo(f"{name}.bias", "F32", (out,))]


def _norm(name: str, width: int) -> list[TensorInfo]:
    return [TensorInfo(f"{name}.weight", "F32", (width,)), TensorInfo(f"{name}.bias", "F32", (width,))]
