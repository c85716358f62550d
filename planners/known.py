"""Everything the parts of a plan are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.models import Spec
from .costs import Costs, checkpoint_costs
from .devices import Rates, rates, with_digest
from .machine import Machine, Measured
from .shards import TensorInfo
from .sizes import Sizes, count_sizes
from .times import StepTimes, step_times


@dataclass(frozen=True, slots=True)
class Known:
    """What the spec and the machine say, and what follows from them at once."""

    spec: Spec
    machine: Machine
    rates: Rates
    sizes: Sizes | None
    times: StepTimes | None
    bytes_per_s: float
    """Rate of a rank's storage channel."""

    @property
    def window_s(self) -> float | None:
        """Time per step in which the state is constant."""
        if self.times is None:
            return None
        return self.spec.micro_batches * (self.times.forward_s + self.times.backward_s)

    @property
    def step_s(self) -> float | None:
        """Time of a step without checkpoints."""
        if self.times is None or self.window_s is None:
            return None
        return self.window_s + self.times.exchange_s + self.times.optimizer_s

    @property
    def costs(self) -> Costs | None:
        """Costs of one checkpoint."""
        if self.sizes is None or self.window_s is None:
            return None
        return checkpoint_costs(
            self.sizes.shard_bytes,
            self.spec.cluster.workers_per_node,
            self.bytes_per_s,
            self.window_s,
            self.machine.cpu_cores if self.machine.accelerator == "cpu" else None,
        )


def know(spec: Spec, machine: Machine, measured: Measured | None, parameters: Sequence[TensorInfo] | None) -> Known:
    """Put together what is known; `measured` and `parameters` as for `make_plan`."""
    reached = rates(machine, spec.cluster, spec.training.precision)
    sizes = count_sizes(spec, parameters)
    bandwidth = spec.cluster.channels.storage.bandwidth
    if bandwidth == "auto":
        copied = measured.copy_bytes_per_s if measured else None
        bandwidth = with_digest(copied) if copied else reached.copy_bytes_per_s
    count, bytes_ = (sizes.parameters, sizes.parameter_bytes) if sizes else (0, 0)
    times = step_times(spec, reached, count, bytes_, measured)
    return Known(spec, machine, reached, sizes, times, bandwidth)
