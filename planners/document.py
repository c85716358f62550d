"""A plan as frozen data, and as the JSON of `dtrain plan --json` and `plan.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from .evaluation import EvaluationPlan
from .expected import Faults
from .memory import DeviceParts, MemoryNeed
from .windows import StorageParameters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Training:
    """The job in figures."""

    world: int
    nodes: int
    workers_per_node: int
    accelerator: str
    strategy: str
    """Degrees above 1."""
    data_parallel: int
    """Ranks, or groups of ranks that work on the same samples."""
    precision: str
    optimizer: str
    max_steps: int
    global_batch_size: int
    micro_batch_size: int
    seq_len: int | None
    tokens_per_step: int | None


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of the model and its state; None: not known before the model is built."""

    parameters: int | None
    layers: int | None
    state_bytes: int | None
    state_bytes_per_rank: int | None
    """The largest shard."""
    tensors: int | None
    """Tensors of the state."""
    forward_flop: int | None
    """Of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Times of one step of one rank without checkpoints; None: not known before they are measured."""

    micro_batches: int
    forward_s: float | None
    backward_s: float | None
    window_s: float | None
    """micro_batches · (forward_s + backward_s): the time in which the state is constant."""
    optimizer_s: float | None
    exchange_s: float | None
    """Part of the gradients' exchange that no backward pass hides."""
    bubble_s: float | None
    """Waits for the other stages of a pipeline; the state is constant in them, too."""
    step_s: float | None
    """window_s + exchange_s + bubble_s + optimizer_s."""


def timed_backward_s(backward_s: float | None, exchange_s: float | None, passes: int | None) -> float | None:
    """A backward pass as a run measures it: with its part of the exchange, for a clock cannot tell the two apart."""
    return backward_s if backward_s is None or not passes else backward_s + (exchange_s or 0.0) / passes


@dataclass(frozen=True, slots=True)
class Storage:
    """The copy of one snapshot."""

    bytes_per_s: float
    """Rate of a rank's storage channel."""
    copy_s: float | None
    """Time of the copy at that rate."""
    load: float | None
    """Part of what one step can take that the copy needs; above 1 it does not fit."""
    pace: float | None
    """Part of the channel's rate at which the windows are filled."""
    capacity_bytes: float | None
    """The most that a rank can copy before an update would have to wait."""
    gradients_s: float | None
    """Time per step in which gradients hold the same link; 0: they have their own."""
    stall_s: float | None
    """Wait of an update that has a snapshot to wait for."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier."""

    type: str
    every: int
    """Steps between two checkpoints."""
    auto: bool
    """Whether the planner chose the interval."""
    why: str
    """What decided the interval."""
    bytes: int | None
    """One checkpoint, all ranks."""
    write_s: float | None
    """Time of one write: of a rank's copy (memory), of a rank's sends (peer), of a node's drain (disk)
    or upload (object)."""
    keep: int
    """Newest whole checkpoints that are kept."""
    keep_every: int | None
    """Checkpoints of steps that are a multiple of this are kept for good; None: no others."""
    peak_bytes: int | None
    """All checkpoints and the one being written, all ranks."""
    peak_files: int | None
    """Their files and folders, or objects; None: in memory."""
    survives: tuple[str, ...]
    """Kinds of fault after which it can still be read."""
    replicas: int | None = None
    """Other nodes that have a copy of each shard; None: no peer tier. It survives the loss of as many."""
    pace_bytes_per_s: float | None = None
    """Rate to which a node holds back what it sends to its peers; None: no limit."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What checkpoints and faults cost; None: not known."""

    overhead: float | None
    """Time that checkpoints add, as a fraction of step_s."""
    budget: float
    """`checkpoint.max_overhead`."""
    stall_s: float | None
    """Time per step that the training waits for checkpoints, on average."""
    lost_steps: Faults
    """Steps of work lost by a fault."""
    recovery_s: Faults
    """Time from a fault to the first repeated step."""
    mtbf_s: Faults
    """Time between two faults of the whole job."""
    goodput: float | None
    """Part of the wall time that goes into steps that last."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What the run has measured, beside what was predicted, and what it settled on."""

    step: int
    """After which it was measured."""
    forward_s: float
    """One forward pass of a micro-batch."""
    backward_s: float
    """One backward pass, as `timed_backward_s` has it."""
    step_s: float
    """Mean time of a step, checkpoints included."""
    copy_bytes_per_s: float
    """Rate at which a rank copied, digest included."""
    snapshot_s: float
    """What a snapshot costs the training: waiting, and longer passes as far as they stand out from the noise."""
    overhead: float
    """Cost of checkpoints as a fraction of a step without."""
    memory_every: int
    """Steps between two snapshots from now on; 0: there is no memory tier."""
    slow_every: int
    """Steps between two checkpoints of the first slower tier from now on; 0: there is none."""
    forward_bytes: int
    """Copied in each forward pass from now on."""
    backward_bytes: int
    slice_bytes: int
    device_bytes_per_rank: int | None = None
    """Peak on the rank that took the most, as `MemoryNeed` has it; None: the attempt goes on, or it is not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's whole answer."""

    name: str
    source: str
    """Where the times come from: `table`, `measured` or `unknown`."""
    training: Training
    model: ModelSize
    iteration: Iteration
    storage: Storage
    forward: StorageParameters
    backward: StorageParameters
    tiers: tuple[TierPlan, ...]
    memory: MemoryNeed
    expected: Expected
    why: tuple[str, ...]
    """Reasons for the storage parameters."""
    changes: tuple[str, ...]
    """What would have to change, and to what, where not every step can be stored as the spec asks."""
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    evaluation: EvaluationPlan | None = None
    """None: the spec has none."""
    measured: Settled | None = None
    """Written by the run; None: by nobody yet."""

    def tier(self, type_: str) -> TierPlan | None:
        """Return the tier of that type, if the plan has one."""
        return next((tier for tier in self.tiers if tier.type == type_), None)

    def going_on(self, before: Plan) -> Plan:
        """Return this plan with what the run had measured under `before`, if both are of the same job."""
        same = self.training == before.training and self.model == before.model and self.forward == before.forward
        intervals = [(tier.type, tier.every, tier.auto) for tier in self.tiers]
        if same and intervals == [(tier.type, tier.every, tier.auto) for tier in before.tiers]:
            return replace(self, measured=before.measured)
        return self

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts and numbers, equal to what `json` reads back."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """Build the plan that `Plan.to_json` wrote; ValueError names what is missing or too much."""
    values = dict(document)
    for key, kind in _PARTS.items():
        values[key] = _build(kind, values.get(key), key)
    for key, kind in _OPTIONAL.items():
        if values.get(key) is not None:
            values[key] = _build(kind, values[key], key)
    values["tiers"] = tuple(_build(TierPlan, tier, "tiers") for tier in values.get("tiers", ()))
    return _build(Plan, values, "plan")


_PARTS: dict[str, type[Any]] = {
    "training": Training,
    "model": ModelSize,
    "iteration": Iteration,
    "storage": Storage,
    "forward": StorageParameters,
    "backward": StorageParameters,
    "memory": MemoryNeed,
    "expected": Expected,
}
_OPTIONAL: dict[str, type[Any]] = {"evaluation": EvaluationPlan, "measured": Settled}
_NESTED: dict[str, type[Any]] = {
    "parts": DeviceParts, "lost_steps": Faults, "recovery_s": Faults, "mtbf_s": Faults,
}  # fmt: skip


def _build(kind: type[T], values: Any, where: str) -> T:
    """Build one dataclass from a mapping with exactly its fields; lists become tuples."""
    if not isinstance(values, Mapping):
        raise ValueError(f"not a plan: {where} is {type(values).__name__}, expected an object")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if names != set(values):
        raise ValueError(
            f"not a plan of this version: {where} misses {sorted(names - set(values))}, "
            f"has unknown {sorted(set(values) - names)}"
        )
    return kind(**{name: _field(name, values[name], where) for name in names})


def _field(name: str, value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Mapping) and name in _NESTED:
        return _build(_NESTED[name], value, f"{where}.{name}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
