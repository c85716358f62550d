"""Which layers of a model stand in which stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ...specs.models import Spec, Strategy


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


def runs_of_stages(weights: Sequence[int], stages: int) -> list[range]:
    """Divide modules in a row into runs, none of them empty, so that the heaviest run is as light as can be.

    The runs are filled from the first one on; `weights` are those of the modules, at least `stages` of them.
    """
    sums = [0, *accumulate(weights)]
    light, heavy = max(weights), max(1, sums[-1])
    while light < heavy:
        limit = (light + heavy) // 2
        if len(_filled(sums, limit)) <= stages:
            heavy = limit
        else:
            light = limit + 1
    edges = [0, *_filled(sums, light)]
    while len(edges) <= stages:  # fewer runs than stages do: the longest ones are cut again
        longest = max(range(len(edges) - 1), key=lambda run: edges[run + 1] - edges[run])
        edges.insert(longest + 1, (edges[longest] + edges[longest + 1]) // 2)
    return [range(begin, end) for begin, end in pairwise(edges)]


def _filled(sums: Sequence[int], limit: int) -> list[int]:
    """Ends of the runs, each as long as it can be without weighing more than `limit`."""
    ends, begin = [], 0
    for end in range(1, len(sums)):
        if sums[end] - sums[begin] > limit:
            ends.append(end - 1)
            begin = end - 1
    return [*ends, len(sums) - 1]
