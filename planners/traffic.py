"""What a strategy sends besides the gradients of replicas, and what share of the passes' work one rank has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..specs.models import GptModel, Spec
from .devices import Rates
from .models import gpt
from .models.activations import cuts_sequence
from .models.gpt import ELEMENT_BYTES
from .models.workload import Workload
from .sharding.layers import stages_of_rank, stages_per_rank
from .sharding.layout import shared_by_ends
from .sharding.mesh import DIMS, mesh_of
from .sizes import Sizes

REDUCES_PER_LAYER = 2
"""All-reduces of the activations in a layer's forward pass, and in its backward pass: after attention and after the
MLP (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Cut along the sequence each is a reduce-scatter and an
all-gather, which together send as much (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of one rank on the compute channel; per micro-batch unless said otherwise."""

    tensor_s: float = 0.0
    """Activations in a forward pass, or in a backward pass; no computation goes on meanwhile."""
    gather_s: float = 0.0
    """Weights put together for one pass."""
    scatter_s: float = 0.0
    """Gradients divided, and summed over replicas, in one backward pass."""
    step_s: float = 0.0
    """Once per step: a pipeline gathers and sums, and adds up a tied embedding, when all its passes have run."""
    boundary_s: float = 0.0
    """Activations to the next stage, in each direction."""
    crossing_s: float = 0.0
    """Of a forward and a backward pass together: as long as this, what is sent in them leaves the node, or, in a job of
    one node, the device."""


@dataclass(frozen=True, slots=True)
class Link:
    """What the ranks that differ in one dimension of the mesh send each other over."""

    bytes_per_s: float
    """Of a ring over them."""
    crosses: bool
    """Whether it leaves the node, or, in a job of one node, the device."""


def link(spec: Spec, rates: Rates, dim: str) -> Link:
    """Return the link of one dimension.

    Ranks are counted tp first, pp last. Of a ring between nodes each of its ranks on a node carries a part; the node's
    other ranks are in other rings, which send at the same time.
    """
    mesh, workers = mesh_of(spec), spec.cluster.workers_per_node
    inner = DIMS[DIMS.index(dim) + 1 :]
    stride = math.prod(degree for of, degree in zip(DIMS, mesh.shape, strict=True) if of in inner)
    extent = stride * mesh.shape[DIMS.index(dim)]
    if spec.cluster.nodes == 1 or (extent <= workers and workers % extent == 0):
        return Link(rates.node_bytes_per_s, spec.cluster.nodes == 1)
    together = 1 if dim == "pp" else max(1, min(workers, extent) // stride)
    return Link(min(rates.node_bytes_per_s, rates.network_bytes_per_s * together), True)


def ring_s(bytes_: float, ranks: int, bytes_per_s: float) -> float:
    """Return the time of an all-gather or a reduce-scatter of `bytes_` in a ring: (n-1)/n of them over each link.

    An all-reduce takes twice that (Patarasuk & Yuan 2009).
    """
    return (ranks - 1) / ranks * bytes_ / bytes_per_s


def traffic(spec: Spec, rates: Rates, work: Workload | None, sizes: Sizes | None) -> Traffic:
    """Return what the strategy of a spec sends; nothing for plain replicas, whose exchange is counted apart."""
    strategy = spec.strategy
    shard, tp, pp, replicas = strategy.dp_shard, strategy.tp, strategy.pp, strategy.replicas(spec.world_size)
    if (shard, tp, pp) == (1, 1, 1) or sizes is None:
        return Traffic()
    links = {dim: link(spec, rates, dim) for dim in DIMS}
    gather = ring_s(sizes.stage_parameter_bytes, shard, links["dp_shard"].bytes_per_s)
    summed = 2 * ring_s(sizes.stage_parameter_bytes / shard, replicas, links["dp_replicate"].bytes_per_s)
    tensor, boundary = 0.0, 0.0
    if work is not None and work.tokens is not None and isinstance(spec.model, GptModel):
        activations = work.samples * work.tokens * spec.model.d_model * ELEMENT_BYTES[spec.training.precision]
        tensor = REDUCES_PER_LAYER * _layers(spec, spec.model) * 2 * ring_s(activations, tp, links["tp"].bytes_per_s)
        sent = activations / (tp if cuts_sequence(spec) else 1)
        boundary = stages_per_rank(strategy) * sent / links["pp"].bytes_per_s if pp > 1 else 0.0
    again = 2 if strategy.activation_checkpointing == "full" else 1
    crossing = links["tp"].crosses * (1 + again) * tensor + links["pp"].crosses * 2 * boundary
    if pp > 1:
        step = 2 * gather + summed + _tied_ends_s(spec, sizes, links["pp"])
        return Traffic(tensor, step_s=step, boundary_s=boundary, crossing_s=crossing)
    crossing += links["dp_shard"].crosses * 3 * gather + links["dp_replicate"].crosses * summed
    return Traffic(tensor, gather, gather + summed, crossing_s=crossing)


def _tied_ends_s(spec: Spec, sizes: Sizes, over: Link) -> float:
    """Return the time of the all-reduce of a tied embedding's gradients between the first and the last stage.

    Each of the two ranks has vocab_size·d_model/(tp·dp_shard) of them, in the dtype of the weights; there is none where
    the head is a matrix of its own (Narayanan et al. 2021, arXiv:2104.04473, section 5; `engine/parallel/ends.py`).
    """
    if not isinstance(spec.model, GptModel) or not shared_by_ends(spec):
        return 0.0
    numbers = spec.model.vocab_size * spec.model.d_model / (spec.strategy.tp * spec.strategy.dp_shard)
    return 2 * ring_s(numbers * sizes.parameter_bytes / sizes.parameters, 2, over.bytes_per_s)


def _layers(spec: Spec, model: GptModel, pp_rank: int = 0) -> int:
    """Layers of a rank of the pipeline; the first one has the most of them."""
    return sum(map(len, stages_of_rank(spec.strategy, model.n_layers, pp_rank)))


def share_of_passes(spec: Spec, work: Workload | None) -> float:
    """Return the part of a pass's operations that the slowest rank has: its layers, and the last one the head."""
    strategy = spec.strategy
    if not isinstance(spec.model, GptModel) or work is None or not work.forward_flop or work.tokens is None:
        return 1 / (strategy.tp * strategy.pp)
    head = gpt.head_flop(spec.model, work.samples, work.tokens)
    layer = (work.forward_flop - head) / spec.model.n_layers
    ranks = [_layers(spec, spec.model, rank) * layer for rank in range(strategy.pp)]
    ranks[-1] += head
    return max(ranks) / work.forward_flop / strategy.tp


def bubble_s(spec: Spec, forward_s: float, backward_s: float) -> float:
    """Return the time in which a rank of a pipeline waits for others in one step.

    (p-1)·(t_forward + t_backward), divided by the stages per rank where they are interleaved (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2).
    """
    return (spec.strategy.pp - 1) * (forward_s + backward_s) / stages_per_rank(spec.strategy)
