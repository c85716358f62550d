"""Evaluations as the planner counts them: forward passes after a step, in which the state is constant too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..specs.datasets import PythonDataset
from ..specs.models import Spec
from .models.workload import Workload
from .times import StepTimes


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """One evaluation. It lies between two steps and is no part of their time."""

    every: int
    """Steps between two."""
    batches: int
    """Micro-batches, over all ranks."""
    windows: int
    """Forward passes of one rank, at most: forward windows in which the copy goes on."""
    forward_s: float | None
    """One of them; None: not known."""
    time_s: float | None
    """windows · forward_s: what an evaluation adds to the run, and to the time in which the state is constant."""


def plan_evaluation(spec: Spec, work: Workload | None, times: StepTimes | None) -> EvaluationPlan | None:
    """Return what one evaluation takes; None where the spec has none.

    A pass is taken to last as long as one of training, which is an upper estimate (it keeps nothing for a backward
    pass); where its samples are of another length, by the ratio of their operations.
    """
    if spec.evaluation is None:
        return None
    windows = -(-spec.evaluation.batches // spec.data_parallel)
    forward_s = None if times is None else times.forward_s * _length_ratio(spec, work)
    time_s = None if forward_s is None else windows * forward_s
    return EvaluationPlan(spec.evaluation.every, spec.evaluation.batches, windows, forward_s, time_s)


def _length_ratio(spec: Spec, work: Workload | None) -> float:
    """Operations of a forward pass over the evaluation's samples per operation over those of training."""
    own = spec.evaluation.dataset if spec.evaluation is not None else None
    if own is None or isinstance(own, PythonDataset) or work is None or not work.forward_flop:
        return 1.0
    longer = replace(work, tokens=own.seq_len).forward_flop
    return longer / work.forward_flop if longer else 1.0
