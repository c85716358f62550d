"""Which layers of a model stand in which stage of a pipeline."""

from __future__ import annotations

from itertools import pairwise

from ..specs.models import Spec, Strategy


def stages_per_rank(strategy: Strategy) -> int:
    """Stages that one rank of the pipeline holds."""
    return strategy.pp_stages_per_rank or (2 if strategy.pp_schedule == "interleaved-1f1b" else 1)


def windows_per_step(spec: Spec) -> int:
    """Forward passes of one rank in a step, and as many backward ones: each stage that it holds has its own."""
    return spec.micro_batches * stages_per_rank(spec.strategy)


def stages_of_rank(strategy: Strategy, layers: int, pp_rank: int) -> list[range]:
    """The layers of each stage that one rank of the pipeline holds: stage s lies on rank s modulo pp."""
    return layers_of_stages(layers, strategy.pp * stages_per_rank(strategy))[pp_rank :: strategy.pp]


def layers_of_stages(layers: int, stages: int) -> list[range]:
    """Divide the layers, in their order, as evenly as possible; the first stages get one more where it does not fit."""
    each, more = divmod(layers, stages)
    edges = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]
