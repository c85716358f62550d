"""Everything the parts of a plan are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..specs.models import Spec
from .costs import Cores, Costs, checkpoint_costs
from .devices import CPU_COPY_BYTES_PER_S, Rates, rates, with_digest, with_folder, with_items
from .evaluation import EvaluationPlan, plan_evaluation
from .machine import Machine, Measured
from .models.workload import Workload, workload
from .sharding.layers import stages_per_rank, windows_per_step
from .sharding.layout import Cuts
from .sharding.shards import TensorInfo
from .sizes import Sizes, count_sizes
from .times import StepTimes, step_times
from .windows import StorageParameters, Windows, storage_parameters

LEAST_OF_LINK = 0.1
"""Assumed least part of its rate that the copy reaches on a link that is always busy: PCIe starves nobody."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the spec and the machine say, and what follows from them at once."""

    spec: Spec
    machine: Machine
    rates: Rates
    work: Workload | None
    sizes: Sizes | None
    times: StepTimes | None
    bytes_per_s: float
    """Rate of a rank's storage channel that it has for itself."""
    copier_bytes_per_s: float
    """Rate of a copier on a CPU while it has a core."""
    windows: Windows | None
    """The step as that channel sees it; None: times are not known."""
    on: Callable[[Spec], Known]
    """The same with the hardware and channels of another spec; its model and strategy are this one's."""

    @property
    def step_s(self) -> float | None:
        """Time of a step without checkpoints."""
        if self.times is None or self.windows is None:
            return None
        return self.windows.window_s + self.windows.exchange_s + self.times.optimizer_s

    @property
    def evaluation(self) -> EvaluationPlan | None:
        """What one evaluation takes, where the spec has them."""
        return plan_evaluation(self.spec, self.work, self.times)

    @property
    def storage_parameters(self) -> tuple[StorageParameters, StorageParameters]:
        """Storage parameters of forward and backward windows."""
        shard = self.sizes.shard_bytes if self.sizes else None
        first = tuple(tier.type for tier in self.spec.used_tiers[:1])
        return storage_parameters(shard, windows_per_step(self.spec), self.windows, first)

    @property
    def costs(self) -> Costs | None:
        """Costs of one checkpoint."""
        if self.sizes is None or self.windows is None:
            return None
        cores, workers = None, self.spec.cluster.workers_per_node
        if self.machine.accelerator == "cpu":
            cores = Cores(self.machine.cpu_cores, self.machine.spare_cores(workers))
        peer = self.spec.peer_tier
        replicas = peer.replicas if peer is not None else 0
        shard, copier = self.sizes.shard_bytes, self.copier_bytes_per_s
        return checkpoint_costs(shard, self.spec.cluster, self.windows, self.rates, copier, cores, replicas)


def know(
    spec: Spec,
    machine: Machine,
    measured: Measured | None,
    parameters: Sequence[TensorInfo] | None,
    cuts: Cuts | None = None,
) -> Known:
    """Put together what is known; `measured`, `parameters` and `cuts` as for `make_plan`."""
    work = workload(spec)
    sizes = count_sizes(spec, work.parameters if parameters is None and work is not None else parameters, cuts)
    return _timed(spec, machine, measured, work, sizes)


def _timed(
    spec: Spec, machine: Machine, measured: Measured | None, work: Workload | None, sizes: Sizes | None
) -> Known:
    reached = rates(machine, spec.cluster, spec.training.precision, measured)
    if spec.object_tier is not None and spec.object_tier.is_folder:
        reached = with_folder(reached, spec.cluster, measured)
    times = step_times(spec, reached, work, sizes, measured)
    bandwidth = _channel_bytes_per_s(spec, reached, measured, sizes)
    windows = _windows(spec, machine, reached, times, bandwidth)
    seen = measured.channel_bytes_per_s if measured is not None else None
    copier = seen or _over_pieces(with_digest(CPU_COPY_BYTES_PER_S), sizes)
    return Known(
        spec, machine, reached, work, sizes, times, bandwidth, copier, windows,
        lambda other: _timed(other, machine, measured, work, sizes),
    )  # fmt: skip


def _channel_bytes_per_s(spec: Spec, reached: Rates, measured: Measured | None, sizes: Sizes | None) -> float:
    """Return the rate of a rank's storage channel: as given, as measured, or by the table and the number of pieces."""
    given = spec.cluster.channels.storage.bandwidth
    if given != "auto":
        return given
    if measured is not None and measured.channel_bytes_per_s:
        return measured.channel_bytes_per_s
    return _over_pieces(reached.copy_bytes_per_s, sizes)


def _over_pieces(bytes_per_s: float, sizes: Sizes | None) -> float:
    return bytes_per_s if sizes is None else with_items(bytes_per_s, sizes.shard_bytes, sizes.shard_items)


def _shares_link(spec: Spec, machine: Machine) -> bool:
    shared = spec.cluster.channels.storage.shared
    return machine.accelerator != "cpu" and spec.cluster.nodes > 1 if shared == "auto" else shared


def _windows(
    spec: Spec, machine: Machine, reached: Rates, times: StepTimes | None, bytes_per_s: float
) -> Windows | None:
    """Return the step as the storage channel sees it, with the compute channel on it where both share a link.

    The compute channel goes first: what it leaves is the link's rate less its own, and of that the copier, which copies
    and digests by turns, reaches its part. What a strategy sends in every pass lowers the rate of all windows alike,
    for it comes layer by layer; what is sent once per step has its time at the end.
    """
    if times is None or times.forward_s + times.backward_s <= 0:
        return None
    shared = _shares_link(spec, machine)
    held_s = times.gradients_s if shared else 0.0
    link = reached.link_bytes_per_s or bytes_per_s
    part = spec.cluster.workers_per_node if spec.cluster.nodes > 1 else 1
    left = max(0.0, link - reached.exchange_bytes_per_s / part)
    beside = min(bytes_per_s, with_digest(left) if left > 0 and reached.link_bytes_per_s else left)
    busy = min(1.0, times.crossing_s / (times.forward_s + times.backward_s)) if shared else 0.0
    bytes_per_s = max(LEAST_OF_LINK * bytes_per_s, (1 - busy) * bytes_per_s + busy * beside)
    count, each = windows_per_step(spec), stages_per_rank(spec.strategy)
    constant_s = times.exchange_s + times.bubble_s
    return Windows(count, times.forward_s / each, times.backward_s / each, bytes_per_s, constant_s, held_s, beside)
