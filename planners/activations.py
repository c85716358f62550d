"""Activations that one rank keeps at once, by the strategy."""

from __future__ import annotations

from ..specs.datasets import TokenDataset
from ..specs.models import GptModel, Spec
from .gpt import ELEMENT_BYTES, last_activation_bytes, layer_activation_bytes
from .layers import stages_of_rank, stages_per_rank
from .workload import Workload


def rank_activation_bytes(spec: Spec, work: Workload | None) -> int:
    """Return the most that a rank keeps; 0 where the family of the model, or its tokens, are not known."""
    if work is None or work.activation_bytes is None:
        return 0
    if not isinstance(spec.model, GptModel) or work.tokens is None:
        return work.activation_bytes
    return work.samples * work.tokens * max(_per_token(spec, rank) for rank in range(spec.strategy.pp))


def _per_token(spec: Spec, pp_rank: int) -> int:
    """Bytes per token of one micro-batch, times the micro-batches that are between forward and backward at once."""
    assert isinstance(spec.model, GptModel)
    strategy, precision = spec.strategy, spec.training.precision
    layers = max(map(len, stages_of_rank(strategy, spec.model.n_layers, pp_rank)))
    whole = layer_activation_bytes(spec.model, precision, strategy.tp, sequence=cuts_sequence(spec))
    kept, again = whole, 0
    if strategy.activation_checkpointing == "full":
        kept = ELEMENT_BYTES[precision] * spec.model.d_model // (strategy.tp if cuts_sequence(spec) else 1)
        again = whole  # of the one layer that is computed again
    last = last_activation_bytes(spec.model, precision) if pp_rank == strategy.pp - 1 else 0
    return in_flight(spec, pp_rank) * layers * kept + again + last


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
