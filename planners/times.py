"""How long the parts of a step take: passes, exchange of gradients, update."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.models import AdamW, Spec
from .devices import Rates
from .machine import Measured
from .models.workload import BACKWARD_TO_FORWARD, Workload
from .sizes import Sizes
from .traffic import Traffic, bubble_s, ring_s, share_of_passes, traffic


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one rank in one step; the passes are per micro-batch, with what they wait for on the compute channel."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients_s: float
    """The whole exchange of the gradients where it is made once per step, in and after the last backward pass."""
    exchange_s: float
    """The part of it that no backward pass hides."""
    bubble_s: float = 0.0
    """Waits for the other stages of a pipeline."""
    crossing_s: float = 0.0
    """Of a forward and a backward pass together: the time in which what the strategy sends leaves the node."""


def step_times(
    spec: Spec, rates: Rates, work: Workload | None, sizes: Sizes | None, measured: Measured | None
) -> StepTimes | None:
    """Return the times of a step: measured ones if there are any, else by arithmetic; None: not known.

    What was measured of one rank with the whole model is divided as the strategy divides its operations.
    """
    share, sent = share_of_passes(spec, work), traffic(spec, rates, work, sizes)
    if measured is not None and measured.spread:
        return StepTimes(
            measured.forward_s, measured.backward_s, measured.optimizer_s, sent.step_s, sent.step_s,
            crossing_s=sent.crossing_s,
        )  # fmt: skip
    parameters = sizes.rank_parameter_bytes // 4 if sizes else 0
    if measured is not None:
        forward_s, backward_s = measured.forward_s * share, measured.backward_s * share
        optimizer_s = measured.optimizer_s
        if sizes and sizes.rank_parameter_bytes < sizes.parameter_bytes:
            optimizer_s *= sizes.rank_parameter_bytes / sizes.parameter_bytes
    elif work is not None and work.forward_flop is not None:
        layers, flop_s = work.model.n_layers / spec.strategy.pp, share * work.forward_flop / rates.flop_per_s
        forward_s, backward_s = (
            max(part * flop_s, layers * least_s)
            for part, least_s in zip((1, BACKWARD_TO_FORWARD), rates.launch_s, strict=True)
        )
        optimizer_s = update_bytes(spec, parameters) / rates.update_bytes_per_s
        if sizes:
            optimizer_s += sizes.parameter_tensors / spec.strategy.pp * rates.update_tensor_s
    else:
        return None
    if spec.strategy.activation_checkpointing == "full":
        backward_s += forward_s
    return _with_traffic(spec, rates, sizes, sent, measured, (forward_s, backward_s, optimizer_s))


def _with_traffic(
    spec: Spec,
    rates: Rates,
    sizes: Sizes | None,
    sent: Traffic,
    measured: Measured | None,
    times: tuple[float, float, float],
) -> StepTimes:
    """Add what the strategy sends: replicas exchange once per step, FSDP2 in every pass, a pipeline at its end."""
    forward_s, backward_s, optimizer_s = times
    strategy = spec.strategy
    again = 2 if strategy.activation_checkpointing == "full" else 1
    forward_s = _beside(rates, forward_s, sent.gather_s) + sent.tensor_s + sent.boundary_s
    backward_s = _beside(rates, backward_s, sent.gather_s + sent.scatter_s) + again * sent.tensor_s + sent.boundary_s
    if (strategy.dp_shard, strategy.tp, strategy.pp) != (1, 1, 1):
        bubble = bubble_s(spec, forward_s, backward_s)
        return StepTimes(forward_s, backward_s, optimizer_s, sent.step_s, sent.step_s, bubble, sent.crossing_s)
    gradient_bytes = sizes.parameter_bytes if sizes else 0
    gradients_s = ring_exchange_s(gradient_bytes, spec.world_size, rates.exchange_bytes_per_s)
    exchange_s = measured.exchange_s if measured is not None else None
    if exchange_s is None:
        exchange_s = exposed_exchange_s(gradient_bytes, spec.world_size, rates, backward_s)
    return StepTimes(forward_s, backward_s, optimizer_s, gradients_s, exchange_s)


def _beside(rates: Rates, compute_s: float, sent_s: float) -> float:
    """A pass that gathers or scatters layer by layer: accelerators compute meanwhile, processors do not."""
    return compute_s + sent_s if rates.sum_bytes_per_s else max(compute_s, sent_s)


def update_bytes(spec: Spec, parameters: int) -> int:
    """Return the device memory traffic of one update, in bytes, everything in fp32.

    Tensors read and written once each: adamw reads weight, gradient and two moments and writes three of them
    back (7); sgd with momentum reads three and writes two (5), without it reads two and writes one (3).
    Clipping reads the gradient for its norm, then reads and writes it (3).
    """
    optimizer = spec.training.optimizer
    touched = 7 if isinstance(optimizer, AdamW) else 5 if optimizer.momentum > 0 else 3
    if spec.training.max_grad_norm is not None:
        touched += 3
    return 4 * touched * parameters


def ring_exchange_s(bytes_: int, world: int, bytes_per_s: float) -> float:
    """Return the time of a ring all-reduce: 2·(w-1)/w of the data over each link (Patarasuk & Yuan 2009)."""
    return 2 * ring_s(bytes_, world, bytes_per_s)


def exposed_exchange_s(gradient_bytes: int, world: int, rates: Rates, backward_s: float) -> float:
    """Return the part of the gradients' all-reduce that sticks out of the last backward pass.

    Buckets travel while the pass still computes (Li et al. 2020, arXiv:2006.15704, section 3.2); that overlap
    is taken to be whole, so on accelerators this is a lower estimate. Where processors send and add the gradients
    they compute nothing else meanwhile, so at least that time is not hidden.
    """
    whole_s = ring_exchange_s(gradient_bytes, world, rates.exchange_bytes_per_s)
    own_s = ring_exchange_s(gradient_bytes, world, rates.sum_bytes_per_s) if rates.sum_bytes_per_s else 0.0
    return max(own_s, whole_s - backward_s, 0.0)
