"""Activations that one rank keeps at once; of the built-in decoder tensor by tensor, as torch runs it."""

from __future__ import annotations

from ...specs.datasets import TokenDataset
from ...specs.models import GptModel, Spec
from ..sharding.layers import stages_of_rank, stages_per_rank
from ..sharding.mesh import mesh_of
from .gpt import ELEMENT_BYTES, matrix_elements
from .workload import Workload

WIDE_BYTES = {"fp32": 4, "bf16-mixed": 4, "fp16-mixed": 4, "bf16": 2}
"""Bytes of one element of the residual stream, and of a weight: autocast leaves both alone."""


def rank_activation_bytes(spec: Spec, work: Workload | None, *, on_cpu: bool) -> int:
    """Return the most that a rank keeps for its backward passes and works with in them.

    0 where the family of the model, or its tokens, are not known.
    """
    if work is None or work.activation_bytes is None:
        return 0
    if not isinstance(spec.model, GptModel) or work.tokens is None:
        return work.activation_bytes
    layer = layer_bytes(spec, spec.model, work.tokens, on_cpu=on_cpu)
    tokens, ranks = work.samples * work.tokens, range(spec.strategy.pp)
    return max(_of_rank(spec, spec.model, rank, tokens, layer, on_cpu=on_cpu) for rank in ranks)


def _of_rank(spec: Spec, model: GptModel, pp_rank: int, tokens: int, layer: int, *, on_cpu: bool) -> int:
    """What passes have kept when the last of them begins its backward pass, and what that works with."""
    layers = max(map(len, stages_of_rank(spec.strategy, model.n_layers, pp_rank)))
    kept, again = layer, 0
    if spec.strategy.activation_checkpointing == "full":
        kept, again = _border_bytes(spec, model), layer  # of the one layer that is computed again
    passes = in_flight(spec, pp_rank) * layers * kept + again + _buffers(spec, pp_rank) * _border_bytes(spec, model)
    last = pp_rank == spec.strategy.pp - 1
    head = _norm_bytes(spec, model, on_cpu=on_cpu) + model.d_model * ELEMENT_BYTES[spec.training.precision]
    first = 0 if pp_rank else _embedding_gradient_bytes(spec, model)
    return tokens * (passes + last * head) + first + _working_bytes(spec, model, pp_rank, tokens)


def layer_bytes(spec: Spec, model: GptModel, seq_len: int, *, on_cpu: bool) -> int:
    """Return the bytes per token that one layer keeps on one rank for its backward pass.

    The method is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1); the tensors are those that torch
    saves for this block, which `tests/planners/test_activations_torch.py` compares. With D width, H heads, K key and
    value heads, h head size, F hidden width: what the two norms keep; their outputs, which each matrix product keeps,
    whole on every tensor parallel rank even where the norms are cut along the sequence (that paper gathers them a
    second time instead), and which autocast casts for each product by itself; query, key, value, the attention's output
    as its kernel leaves it and row by row (3·H + 2·K)·h; 4·F for swiglu (gate, its silu, up, product) or 2·F for gelu.
    The s·s scores are not kept, for the fused kernel recomputes them (Dao et al. 2022, arXiv:2205.14135), but on a CPU
    with dropout, where there is no such kernel.
    """
    tp, narrow = spec.strategy.tp, ELEMENT_BYTES[spec.training.precision]
    gated = model.activation == "swiglu"
    products = (5 if gated else 4) if spec.training.precision.endswith("-mixed") else 2
    heads = narrow * (3 * model.n_heads + 2 * model.kv_heads) * model.head_dim
    masks = 2 * model.d_model if model.dropout > 0 else 0
    if on_cpu and model.dropout > 0:  # soft-max, mask and their product, beside query, key and value, all in fp32
        heads = model.n_heads * (4 * 3 * (seq_len + model.head_dim) + narrow * model.head_dim)
        masks *= narrow
    hidden = narrow * (4 if gated else 2) * model.ff_dim
    return (
        2 * _norm_bytes(spec, model, on_cpu=on_cpu)
        + narrow * products * model.d_model
        + (heads + hidden) // tp
        + masks // (tp if cuts_sequence(spec) else 1)
    )


def _norm_bytes(spec: Spec, model: GptModel, *, on_cpu: bool) -> int:
    """What a norm keeps per token: its input; on a CPU, which has no kernel for it, input and quotient in fp32."""
    wide = 2 * 4 if on_cpu else WIDE_BYTES[spec.training.precision]
    return wide * model.d_model // (spec.strategy.tp if cuts_sequence(spec) else 1)


def _border_bytes(spec: Spec, model: GptModel) -> int:
    """What goes from one layer to the next, per token."""
    return WIDE_BYTES[spec.training.precision] * model.d_model // (spec.strategy.tp if cuts_sequence(spec) else 1)


def _buffers(spec: Spec, pp_rank: int) -> int:
    """Borders of micro-batches for which a rank of a pipeline has buffers.

    torch's stages have one for every micro-batch of a step, for what comes from the stage before, and for the gradient
    that comes from the one behind.
    """
    strategy, total = spec.strategy, spec.strategy.pp * stages_per_rank(spec.strategy)
    stages = range(pp_rank, total, strategy.pp)
    return spec.micro_batches * sum((stage > 0) + (stage < total - 1) for stage in stages)


def _embedding_gradient_bytes(spec: Spec, model: GptModel) -> int:
    """What the embedding's gradient takes beyond its part of the weights.

    Under tensor parallel torch gives every rank a gradient of all rows, a term of the sum, and it stays so until the
    update; FSDP2 divides it before.
    """
    tp = spec.strategy.tp
    if tp == 1 or model.tie_embeddings or mesh_of(spec).by_fsdp:
        return 0
    return WIDE_BYTES[spec.training.precision] * model.vocab_size * model.d_model * (tp - 1) // tp


def _working_bytes(spec: Spec, model: GptModel, pp_rank: int, tokens: int) -> int:
    """What a backward pass works with: logits, and a weight's gradient before it is added to those of other passes.

    Of logits there are at once, in fp32, their log-soft-max, its gradient and their own, and as they were where a
    pipeline, or the gathering by tensor parallel, holds on to them. When the head multiplies with their gradient, that
    of its weight is new. FSDP2 has gradients whole anyway, which is counted with the weights that it puts together.
    """
    strategy, precision = spec.strategy, spec.training.precision
    weight = WIDE_BYTES[precision]
    new = 0 if mesh_of(spec).by_fsdp else weight * matrix_elements(model) // strategy.tp
    if pp_rank < strategy.pp - 1:
        return new
    held = tokens * model.vocab_size * ELEMENT_BYTES[precision]
    kept = held if (strategy.pp, strategy.tp) != (1, 1) else 0
    of_head = 0 if mesh_of(spec).by_fsdp else weight * model.vocab_size * model.d_model // strategy.tp
    return max(kept + 3 * 4 * tokens * model.vocab_size, kept + held + of_head, new)


def in_flight(spec: Spec, pp_rank: int) -> int:
    """Forward passes of a stage whose backward pass has not begun, at most.

    1f1b: as many as stages follow (Narayanan et al. 2019, PipeDream); gpipe: all; interleaved: v·p + p - 1 passes of
    the shorter stages (Narayanan et al. 2021, arXiv:2104.04473).
    """
    strategy, passes = spec.strategy, spec.micro_batches
    if strategy.pp == 1:
        return 1
    if strategy.pp_schedule == "gpipe":
        return passes
    if strategy.pp_schedule == "1f1b":
        return min(passes, strategy.pp - pp_rank)
    each = stages_per_rank(strategy)
    return min(passes * each, each * strategy.pp + strategy.pp - 1)


def cuts_sequence(spec: Spec) -> bool:
    """Tell whether tensor parallel cuts what lies between the matrix products along the sequence.

    Not where it does not divide evenly, nor with dropout: ranks of a tensor parallel group draw alike.
    """
    fits = isinstance(spec.dataset, TokenDataset) and spec.dataset.seq_len % spec.strategy.tp == 0
    return spec.strategy.tp > 1 and fits and getattr(spec.model, "dropout", 0.0) == 0.0
