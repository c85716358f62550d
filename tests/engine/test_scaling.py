"""The loss of fp16: scaled, and an update that would not be finite is left out by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtrain.engine.optim.optimizers import unscale
from dtrain.engine.training.scaling import FIRST, GROWTH_INTERVAL, LEAST, LossScale, lacks_scale, scale_of


def test_it_does_as_torchs_own_scaler() -> None:
    mine, reference = LossScale(), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    outcomes = [True, False, True, *([True] * GROWTH_INTERVAL), False, False, True]
    for finite in outcomes:
        reference.scale(torch.ones(())).item()
        weight.grad = torch.full((2,), 1.0 if finite else float("inf"))
        reference.step(optimizer)
        reference.update()
        mine.update(finite=finite)
        assert (mine.scale, mine.good) == (reference.get_scale(), reference._get_growth_tracker())


def test_it_is_put_back_from_a_checkpoint() -> None:
    assert scale_of("fp32") is None
    assert scale_of("bf16-mixed", {"scale": 2.0, "good": 1}) is None
    assert scale_of("fp16-mixed") == LossScale(FIRST, 0)
    assert scale_of("fp16-mixed", LossScale(512.0, 7).to_json()) == LossScale(512.0, 7)


def test_a_scale_that_cannot_be_the_answer_ends_the_search() -> None:
    scale = LossScale()
    updates = 0
    while not scale.is_spent(loss_finite=True):
        scale.update(finite=False)
        updates += 1
    assert scale.scale == LEAST
    assert updates == 30


def test_a_loss_that_is_no_number_leaves_the_scale_as_it_is_and_may_come_twice_in_a_row() -> None:
    scale = LossScale(512.0, 7)
    for spent in (False, False, True):
        assert scale.is_spent(loss_finite=False) is spent
        assert not scale.is_spent(loss_finite=True)
        scale.update(finite=False, loss_finite=False)
    assert (scale.scale, scale.good) == (512.0, 7)
    assert scale_of("fp16-mixed", scale.to_json()) == scale, "a restart does not begin to count anew"
    scale.update(finite=False)
    assert not scale.is_spent(loss_finite=False), "one that is a number ends the row"


@pytest.mark.parametrize(
    ("meta", "lacks"),
    [
        ({"spec": {"training": {"precision": "fp16-mixed"}}}, True),
        ({"spec": {"training": {"precision": "fp16-mixed"}}, "loss_scale": {"scale": 2.0, "good": 1}}, False),
        ({"spec": {"training": {"precision": "fp32"}}}, False),
        ({}, True),
    ],
)
def test_a_checkpoint_of_a_scaled_run_says_the_scale(meta: dict[str, Any], lacks: bool) -> None:
    assert lacks_scale(meta) is lacks


@pytest.mark.parametrize("scale", [0.5, 1024.0])
def test_what_is_scaled_is_unscaled(scale: float) -> None:
    model = nn.Linear(3, 2)
    (model(torch.ones(1, 3)).sum() * scale).backward()
    expected = model.weight.grad.clone() / scale
    unscale(model.parameters(), scale)
    assert torch.equal(model.weight.grad, expected)
    unscale(nn.Linear(1, 1).parameters(), scale)
