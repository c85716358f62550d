"""How a model of one's own is cut by tp and pp: what the callable that `model.plan` names says of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...planners.sharding.layers import runs_of_stages, stages_per_rank
from ...planners.sharding.layout import Cuts
from ...specs.datasets import TokenDataset
from ...specs.models import PythonModel, Spec
from ..entry import UserCodeError, UserCodeFailed, call_entry, told
from ..models.build import compute_loss
from .pipeline import Line, Part

Precision = Callable[[], AbstractContextManager[Any]]

TOLERANCE = 1e-3
"""Relative, of the loss of a model that is cut against that of the whole: far above another order of summation, far
below what a forgotten module does."""
COARSE_TOLERANCE = 3e-2
"""The same where products are rounded to 16 bits."""


@dataclass(frozen=True)
class OwnPlan:
    """What the callable has returned, looked through."""

    tp: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """How torch's `parallelize_module` cuts modules, by their names, in which `*` stands for any part."""
    chain: Sequence[Sequence[str]] = ()
    """Names of the modules that a sample goes through, one after the other; those of one item stay together."""
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """Mean loss of what the last module gives, against the second half of a sample."""


class Chain(nn.Module):
    """Modules in a row: a stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Hold them; each is one unit of FSDP2."""
        super().__init__()
        self.modules_in_row = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        """Through one after the other."""
        for module in self.modules_in_row:
            x = module(x)
        return x


def read_plan(spec: Spec, model: nn.Module) -> OwnPlan:
    """Ask the model's plan how it is cut; raises UserCodeError for an answer that does not fit the model."""
    assert isinstance(spec.model, PythonModel)
    assert spec.model.plan is not None  # the spec is refused else
    entry = spec.model.plan
    said = call_entry(entry, {"model": model}, "model.plan")
    if not isinstance(said, Mapping):
        raise _refusal(entry, f"returned {type(said).__name__}, it must return a dict with the keys tp, pp, loss")
    if odd := sorted(str(key) for key in said.keys() - {"tp", "pp", "loss"}):
        raise _refusal(entry, f"returned the key {odd[0]!r}; there are tp, pp and loss")
    tp = _styles(entry, said.get("tp"), model) if spec.strategy.tp > 1 else {}
    if spec.strategy.pp == 1:
        return OwnPlan(tp)
    loss = said.get("loss")
    if not callable(loss):
        raise _refusal(
            entry, "returned no function as loss: pp needs loss(output of the last module, y), the mean loss"
        )
    return OwnPlan(tp, _chain(entry, said.get("pp"), model, spec), loss)


def _refusal(entry: str, words: str) -> UserCodeError:
    return UserCodeError(f"model.plan {entry} {words} (docs/strategies.md)")


def _styles(entry: str, said: Any, model: nn.Module) -> Mapping[str, ParallelStyle]:
    if not isinstance(said, Mapping) or not said:
        raise _refusal(entry, 'returned no dict as tp: like {"layers.*.up": ColwiseParallel(), …}')
    for name, style in said.items():
        if not isinstance(style, ParallelStyle):
            raise _refusal(entry, f"gives {name} a {type(style).__name__} in tp, it must be a ParallelStyle of torch")
        if not _matching(model, name):
            raise _refusal(entry, f"names {name} in tp, and the model has no such module")
    return said


def _matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that `parallelize_module` finds for a name: each part of it by itself may hold a `*`."""
    parts = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if name and len(found := name.split(".")) == len(parts) and all(map(fnmatchcase, found, parts))
    ]


def _chain(entry: str, said: Any, model: nn.Module, spec: Spec) -> list[list[str]]:
    if not isinstance(said, list | tuple) or not said:
        raise _refusal(entry, 'returned no list as pp: names of modules in a row, like ["embedding", "layers.0", …]')
    chain = [[item] if isinstance(item, str) else list(item) for item in said]
    names = [name for item in chain for name in item]
    there = dict(model.named_modules())
    for number, name in enumerate(names):
        if name not in there or not name:
            raise _refusal(entry, f"names {name!r} in pp, and the model has no such module")
        for other in names[:number]:
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise _refusal(entry, f"names {other} and {name} in pp: a module can stand in the row only once")
    stages = spec.strategy.pp * stages_per_rank(spec.strategy)
    if len(chain) < stages:
        raise _refusal(entry, f"returned a row of {len(chain)} in pp, and there are {stages} stages to make of it")
    _check_all_are_in(entry, names, model)
    return chain


def _check_all_are_in(entry: str, names: Sequence[str], model: nn.Module) -> None:
    """Every parameter and buffer belongs to one module of the row, and to no other."""
    at: dict[int, str] = {}
    for name in names:
        module = model.get_submodule(name)
        for own, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if at.setdefault(id(tensor), name) != name:
                shared = f"{name}.{own}"
                raise _refusal(entry, f"puts {shared} into two modules of pp: a pipeline cannot share a tensor yet")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in at:
            raise _refusal(entry, f"leaves out {name}: each parameter and buffer must lie in a module of pp")


def cuts_of(spec: Spec, model: nn.Module) -> Cuts | None:
    """What the plan of a model cuts, for the planner; None where tp and pp cut nothing."""
    if (spec.strategy.tp, spec.strategy.pp) == (1, 1) or not isinstance(spec.model, PythonModel):
        return None
    plan = read_plan(spec, model)
    cut_by = {
        f"{name}.{own}": dim
        for pattern, style in plan.tp.items()
        for name, module in _matching(model, pattern)
        for own, dim in _cut_by(style, module).items()
    }
    everything = frozenset(name for name, _ in model.named_parameters())
    if not plan.chain:
        return Cuts(cut_by, (everything,))
    runs = _runs(plan, model, spec)
    stages = []
    for rank in range(spec.strategy.pp):
        inside = tuple(f"{name}." for run in runs[rank :: spec.strategy.pp] for name in run)
        stages.append(frozenset(name for name in everything if name.startswith(inside)))
    return Cuts(cut_by, tuple(stages))


def _cut_by(style: ParallelStyle, module: nn.Module) -> dict[str, int]:
    """The dimension along which one of torch's styles cuts each parameter; another's are taken for whole."""
    table = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        found = {"weight": 1} if table else {"weight": 0, "bias": 0}
    elif isinstance(style, RowwiseParallel):
        found = {"weight": 0 if table else 1}
    else:
        return {}
    return {name: dim for name, dim in found.items() if getattr(module, name, None) is not None}


def _runs(plan: OwnPlan, model: nn.Module, spec: Spec) -> list[list[str]]:
    """Names of the modules of each stage: as even in parameters as their order allows."""
    stages = spec.strategy.pp * stages_per_rank(spec.strategy)
    weights = [sum(p.numel() for name in item for p in model.get_submodule(name).parameters()) for item in plan.chain]
    return [[name for item in run for name in plan.chain[item]] for run in runs_of_stages(weights, stages)]


def cut(
    model: nn.Module, spec: Spec, tp: DeviceMesh | None, pp_rank: int, batch: Any, precision: Precision
) -> Line | None:
    """Cut `model`, whole and the same on every rank, as its plan says, in place; returns this rank's stages if any.

    What comes out is compared with the whole model's loss of one batch, so that a plan that leaves something out is
    refused: raises UserCodeError, or UserCodeFailed when the plan's own code raises.
    """
    assert isinstance(spec.model, PythonModel)
    plan, runs = read_plan(spec, model), []
    if plan.chain:
        runs = _runs(plan, model, spec)
    with _judged(model):
        with precision():
            whole = float(compute_loss(model, batch))
        if tp is not None and tp.size() > 1:
            with _theirs(spec.model, "tp"):
                parallelize_module(model, tp, dict(plan.tp))
                with precision():
                    _compare(spec, "tp", whole, float(compute_loss(model, batch)))
        if not runs:
            return None
        assert plan.loss is not None
        chains = [Chain([model.get_submodule(name) for name in run]) for run in runs]
        ends = ends_of(spec)
        with _theirs(spec.model, "pp"), precision():
            passed, loss = _through(chains, plan.loss, ends(batch))
        _compare(spec, "pp", whole, float(loss))
    mine = range(pp_rank, len(runs), spec.strategy.pp)
    kept = {name for stage in mine for name in runs[stage]}
    for name in [name for run in runs for name in run if name not in kept]:
        parent, _, leaf = name.rpartition(".")
        del model.get_submodule(parent)._modules[leaf]  # a ModuleList would count the others anew
    parts = [Part(chains[stage], stage, passed[stage], passed[stage + 1]) for stage in mine]
    return Line(parts, len(runs), plan.loss, ends)


def ends_of(spec: Spec) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """From a batch to what enters the first stage and what the loss holds the last one's output against."""

    def pair(batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Tensor) and isinstance(spec.dataset, TokenDataset):
            return batch[:, :-1], batch[:, 1:]
        if isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(half, Tensor) for half in batch):
            return batch[0], batch[1]
        raise UserCodeError(
            "a pipeline takes samples (x, y): what enters the first module of model.plan's pp, and what its loss holds "
            f"the output against; the data set gives {_kind(batch)}"
        )

    return pair


def _kind(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__} of {len(batch)} ({', '.join(type(item).__name__ for item in batch)})"
    return type(batch).__name__


def _through(
    chains: Sequence[Chain], loss: Callable[[Tensor, Tensor], Tensor], ends: tuple[Tensor, Tensor]
) -> tuple[list[Tensor], Tensor]:
    """One batch through all stages: what is passed on at each border, without its memory, and the loss."""
    x, target = ends
    passed = [x.to("meta")]
    for chain in chains:
        x = chain(x)
        if type(x) is not Tensor or not x.is_floating_point():
            raise TypeError(
                f"the modules of pp must hand on one plain tensor of floating point numbers, not {type(x).__name__}"
            )
        passed.append(torch.empty_like(x, device="meta", memory_format=torch.contiguous_format).requires_grad_())
    return passed, loss(x, target)


def _compare(spec: Spec, key: str, whole: float, cut_up: float) -> None:
    assert isinstance(spec.model, PythonModel)
    tolerance = TOLERANCE if spec.training.precision == "fp32" else COARSE_TOLERANCE
    if not math.isclose(whole, cut_up, rel_tol=tolerance, abs_tol=tolerance * 1e-3):
        raise UserCodeError(
            f"model.plan {spec.model.plan}: cut as {key} says, the model has a loss of {cut_up:.6g} for a batch of "
            f"which the whole model's is {whole:.6g}, so it is not the same model (docs/strategies.md)"
        )


@contextlib.contextmanager
def _theirs(model: PythonModel, key: str) -> Iterator[None]:
    try:
        yield
    except (UserCodeError, UserCodeFailed):
        raise
    except Exception as error:
        raise UserCodeFailed(told(error, f"model.plan {model.plan}: cutting the model as {key} says failed")) from error


@contextlib.contextmanager
def _judged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients: nothing is drawn, so that losses can be compared."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training
