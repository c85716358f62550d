"""A diffusion transformer in numbers: its tensors, its floating point operations, its activations.

The network is DiT with adaLN-Zero (Peebles & Xie 2022, arXiv:2212.09748): patches as tokens, time step and label as
conditions from which every block takes six modulations of width D. Letters as in `gpt`.
"""

from __future__ import annotations

from ...specs.shapes import DiffusionShape
from ..sharding.shards import TensorInfo
from .gpt import ELEMENT_BYTES

TIME_FREQUENCIES = 256
"""Sines and cosines that a time step is turned into."""


def parameters(model: DiffusionShape) -> list[TensorInfo]:
    """Return every parameter, all fp32, with the fixed table of positions, which is stored too."""
    width, hidden = model.d_model, model.ff_dim
    pixels = model.patch_size**2 * model.channels
    tensors = [
        TensorInfo("positions", "F32", (model.tokens, width)),
        *_dense("patches", width, pixels),
        *_dense("time.in", width, TIME_FREQUENCIES),
        *_dense("time.out", width, width),
        TensorInfo("labels.weight", "F32", (model.n_classes + 1, width)),
    ]
    for layer in range(model.n_layers):
        tensors += _dense(f"layers.{layer}.attention.qkv", 3 * width, width)
        tensors += _dense(f"layers.{layer}.attention.output", width, width)
        tensors += _dense(f"layers.{layer}.mlp.up", hidden, width) + _dense(f"layers.{layer}.mlp.down", width, hidden)
        tensors += _dense(f"layers.{layer}.modulation", 6 * width, width)
    return [*tensors, *_dense("final.output", 2 * pixels, width), *_dense("final.modulation", 2 * width, width)]


def forward_flop(model: DiffusionShape, samples: int) -> int:
    """FLOP of one forward pass: 2 per weight in a product, attention that sees all tokens 4·s·D per layer and token.

    The weights of the conditions are used once per sample, all others once per token. For DiT-XL/2 on 256² pixels
    this is 2 · 118.6e9 per sample, the figure of the paper (table 4, where "Gflops" count a product and its sum once).
    """
    width, pixels = model.d_model, model.patch_size**2 * model.channels
    per_token = model.n_layers * (4 * width * width + 2 * width * model.ff_dim) + 3 * pixels * width
    per_sample = (6 * model.n_layers + 2) * width * width + (TIME_FREQUENCIES + width) * width
    attention = 4 * model.n_layers * model.tokens * width
    return samples * (model.tokens * (2 * per_token + attention) + 2 * per_sample)


def activation_bytes(model: DiffusionShape, samples: int, precision: str) -> int:
    """Estimate the bytes that one forward pass keeps for its backward pass; method and source as in `gpt`.

    Per token and layer: input and output of both norms 4·D, their modulated forms 2·D, query, key, value and
    attention's output 4·D, what the two gates scale 2·D, MLP 2·F. Per sample and layer the six modulations.
    """
    element_bytes, width = ELEMENT_BYTES[precision], model.d_model
    per_layer = element_bytes * (12 * width + 2 * model.ff_dim)
    last = element_bytes * (3 * width + 2 * model.patch_size**2 * model.channels)
    conditions = element_bytes * model.n_layers * 6 * width
    return samples * (model.tokens * (model.n_layers * per_layer + last) + conditions)


def _dense(name: str, out: int, into: int) -> list[TensorInfo]:
    return [TensorInfo(f"{name}.weight", "F32", (out, into)), TensorInfo(f"{name}.bias", "F32", (out,))]
