"""How long the parts of a step take: passes, exchange of gradients, update."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.models import AdamW, Spec
from .devices import Rates
from .machine import Measured
from .workload import BACKWARD_TO_FORWARD, Workload


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one rank in one step; the passes are per micro-batch."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients_s: float
    """The whole all-reduce of the gradients, once per step, in and after the last backward pass."""
    exchange_s: float
    """The part of it that no backward pass hides."""


def step_times(
    spec: Spec, rates: Rates, work: Workload | None, parameters: int, parameter_bytes: int, measured: Measured | None
) -> StepTimes | None:
    """Return the times of a step: measured ones if there are any, else by arithmetic; None: not known."""
    gradients_s = ring_exchange_s(parameter_bytes, spec.world_size, rates.exchange_bytes_per_s)
    if measured is not None:
        exchange_s = measured.exchange_s
        if exchange_s is None:
            exchange_s = exposed_exchange_s(parameter_bytes, spec.world_size, rates, measured.backward_s)
        return StepTimes(measured.forward_s, measured.backward_s, measured.optimizer_s, gradients_s, exchange_s)
    if work is None or work.forward_flop is None:
        return None
    floor_s = work.model.n_layers * rates.launch_s
    forward_s = max(work.forward_flop / rates.flop_per_s, floor_s)
    backward_s = max(BACKWARD_TO_FORWARD * work.forward_flop / rates.flop_per_s, 2 * floor_s)
    optimizer_s = update_bytes(spec, parameters) / rates.update_bytes_per_s
    exchange_s = exposed_exchange_s(parameter_bytes, spec.world_size, rates, backward_s)
    return StepTimes(forward_s, backward_s, optimizer_s, gradients_s, exchange_s)


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
    return 2 * (world - 1) / world * bytes_ / bytes_per_s


def exposed_exchange_s(gradient_bytes: int, world: int, rates: Rates, backward_s: float) -> float:
    """Return the part of the gradients' all-reduce that sticks out of the last backward pass.

    Buckets travel while the pass still computes (Li et al. 2020, arXiv:2006.15704, section 3.2); that overlap
    is taken to be whole, so on accelerators this is a lower estimate. Where processors send and add the gradients
    they compute nothing else meanwhile, so at least that time is not hidden.
    """
    whole_s = ring_exchange_s(gradient_bytes, world, rates.exchange_bytes_per_s)
    own_s = ring_exchange_s(gradient_bytes, world, rates.sum_bytes_per_s) if rates.sum_bytes_per_s else 0.0
    return max(own_s, whole_s - backward_s, 0.0)
