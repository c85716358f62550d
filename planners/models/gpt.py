"""A llama-style decoder, built in or described, in numbers: its tensors, its operations, its activations.

Letters: V vocabulary, D width, H heads, K key and value heads, h head size, F hidden width of the MLP,
L layers, s tokens per sample, b samples per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...specs.shapes import Decoder
from ..sharding.shards import TensorInfo

ELEMENT_BYTES = {"fp32": 4, "bf16-mixed": 2, "fp16-mixed": 2, "bf16": 2}
"""Bytes of one stored activation element by precision."""


def parameters(model: Decoder) -> list[TensorInfo]:
    """Return every parameter in the order of the module that the engine builds, all fp32."""
    width, head = model.d_model, model.head_dim
    tensors = [_tensor("embedding.weight", model.vocab_size, width)]
    for layer in range(model.n_layers):
        attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"
        tensors += [
            _tensor(f"{attention}_norm.weight", width),
            _tensor(f"{attention}.wq.weight", model.n_heads * head, width),
            _tensor(f"{attention}.wk.weight", model.kv_heads * head, width),
            _tensor(f"{attention}.wv.weight", model.kv_heads * head, width),
            _tensor(f"{attention}.wo.weight", width, model.n_heads * head),
            _tensor(f"{mlp}_norm.weight", width),
        ]
        if model.activation == "swiglu":
            tensors.append(_tensor(f"{mlp}.gate.weight", model.ff_dim, width))
        tensors.append(_tensor(f"{mlp}.up.weight", model.ff_dim, width))
        tensors.append(_tensor(f"{mlp}.down.weight", width, model.ff_dim))
    tensors.append(_tensor("norm.weight", width))
    if not model.tie_embeddings:
        tensors.append(_tensor("head.weight", model.vocab_size, width))
    return tensors


def parameter_count(tensors: Sequence[TensorInfo]) -> int:
    """Elements of all `tensors`."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def matrix_elements(model: Decoder) -> int:
    """Elements of the largest matrix of a layer."""
    return model.d_model * max(model.ff_dim, model.n_heads * model.head_dim)


def matmul_weights(model: Decoder) -> int:
    """Weights that every token is multiplied with: all matrices and the head, but not the embedding look-up.

    A tied head is a multiplication too, so it counts whether its matrix is stored once or twice.
    """
    attention = model.d_model * model.head_dim * 2 * (model.n_heads + model.kv_heads)
    mlp = model.d_model * model.ff_dim * (3 if model.activation == "swiglu" else 2)
    return model.n_layers * (attention + mlp) + model.vocab_size * model.d_model


def forward_flop(model: Decoder, samples: int, seq_len: int) -> int:
    """FLOP of one forward pass over `samples` of `seq_len` tokens.

    Per token 2 per weight in a matrix product, plus 2·s·H·h per layer for attention. That is causal attention:
    scores and weighted values are 2·s·H·h each over all s positions, and the mean token sees half of them. The
    sum is the 2N + 2·n_layer·n_ctx·d_attn of Kaplan et al. 2020 (arXiv:2001.08361, table 1). Norms, soft-max
    and rotary positions are left out, as there.
    """
    attention = 2 * model.n_layers * seq_len * model.n_heads * model.head_dim
    return samples * seq_len * (2 * matmul_weights(model) + attention)


def head_flop(model: Decoder, samples: int, seq_len: int) -> int:
    """FLOP of the head in one forward pass."""
    return samples * seq_len * 2 * model.vocab_size * model.d_model


def activation_bytes(model: Decoder, samples: int, seq_len: int, precision: str) -> int:
    """Estimate the bytes that one forward pass keeps for its backward pass."""
    per_token = model.n_layers * layer_activation_bytes(model, precision) + last_activation_bytes(model, precision)
    return samples * seq_len * per_token


def layer_activation_bytes(model: Decoder, precision: str) -> int:
    """Estimate the bytes per token that one layer of any such decoder keeps for its backward pass.

    Counted tensor by tensor after the method of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for
    this block. Elements per token: input and output of both norms 4·D; query, key, value and the attention's output
    2·(H+K)·h; MLP 4·F for swiglu (gate, its silu, up, product) or 2·F for gelu. With dropout two masks of D bytes. The
    s·s scores are not kept, for the fused kernel recomputes them (Dao et al. 2022, arXiv:2205.14135). For D = H·h,
    F = 4·D and gelu in bf16 this is 34·s·b·D per layer with dropout, the figure of that paper without its score terms.
    """
    mlp_widths = 4 if model.activation == "swiglu" else 2
    heads = 2 * (model.n_heads + model.kv_heads) * model.head_dim
    masks = 2 * model.d_model if model.dropout > 0 else 0
    return ELEMENT_BYTES[precision] * (4 * model.d_model + heads + mlp_widths * model.ff_dim) + masks


def last_activation_bytes(model: Decoder, precision: str) -> int:
    """Bytes per token kept after the layers: 2·D for the last norm, V logits, their fp32 log-soft-max and gradient."""
    element_bytes = ELEMENT_BYTES[precision]
    return element_bytes * 2 * model.d_model + model.vocab_size * (element_bytes + 4 + 4)


def _tensor(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "F32", shape)
