"""Optimizers whose state is there from the start, and the learning rate of every step."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.engine.build import Odd, Plain, content, state_of, update
from torch import nn

from dtrain.engine.optim.optimizers import Average, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from dtrain.engine.snapshot.state import TrainState
from dtrain.specs.models import AdamW, Scheduler, Sgd

OPTIMIZERS = {
    "adamw": AdamW(name="adamw", lr=1e-2, weight_decay=0.3, betas=[0.8, 0.9], eps=1e-6),
    "sgd": Sgd(name="sgd", lr=1e-2, weight_decay=0.3),
    "momentum": Sgd(name="sgd", lr=1e-2, weight_decay=0.3, momentum=0.9),
}
every_optimizer = pytest.mark.parametrize("spec", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def lazy(model: nn.Module, spec: AdamW | Sgd) -> torch.optim.Optimizer:
    """The same optimizer as torch makes it, its state not there before the first update."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if isinstance(spec, Sgd):
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=tuple(spec.betas), eps=spec.eps, fused=True)


@every_optimizer
@pytest.mark.parametrize("updates", [1, 2, 7])
def test_state_made_early_ends_where_torchs_own_does(spec: AdamW | Sgd, updates: int) -> None:
    model = Plain()
    twin = copy.deepcopy(model)
    early, late = state_of(model, spec), TrainState(twin, lazy(twin, spec))
    assert late.optimizer.state == {}
    for seed in range(updates):
        update(early, seed)
        update(late, seed)
    assert content(early) == content(late)


@every_optimizer
def test_the_first_update_adds_no_state(spec: AdamW | Sgd) -> None:
    state = state_of(Odd(), spec)
    before = {name: (t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in state.constant().items()}
    update(state, 1)
    assert {name: (t.dtype, t.shape, t.stride(), t.data_ptr()) for name, t in state.constant().items()} == before


@every_optimizer
def test_a_tensor_that_does_not_lie_row_by_row_is_updated_as_any_other(spec: AdamW | Sgd) -> None:
    model = Odd()
    rows = copy.deepcopy(model)
    for module in rows.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().contiguous()))
    turned = state_of(model, spec)
    for seed in range(3):
        update(turned, seed)
    plain = TrainState(rows, lazy(rows, spec))
    for seed in range(3):
        update(plain, seed)
    for (name, mine), other in zip(turned.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)


@every_optimizer
def test_matrices_decay_and_vectors_do_not(spec: AdamW | Sgd) -> None:
    model = Plain()
    state = state_of(model, spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 1e-2 * 0.3 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * kept, msg=name)
        assert (parameter.dim() >= 2) == (not torch.equal(parameter, before[name])), name


def test_figures_of_the_spec_reach_torch() -> None:
    (group, _) = build_optimizer(Plain(), OPTIMIZERS["adamw"]).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-2, (0.8, 0.9), 1e-6, 0.3)
    (group, _) = build_optimizer(Plain(), OPTIMIZERS["momentum"]).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (1e-2, 0.9, 0.3)


@every_optimizer
def test_row_60_a_parameter_without_a_gradient_stays_as_it_is(spec: AdamW | Sgd) -> None:
    """Row 60: its state is there, as zeros, and begins with its first gradient, not with the first step."""
    model = Plain()
    state, (unused, *used) = state_of(model, spec), list(model.parameters())
    before = unused.detach().clone()
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        for parameter in used:
            parameter.grad = torch.randn(parameter.shape, generator=source)
        state.optimizer.step()
    assert torch.equal(unused, before)
    assert all(not tensor.any() for tensor in state.optimizer.state.get(unused, {}).values())
    fresh = copy.deepcopy(model)
    late = state_of(fresh, spec)
    for one, optimizer in ((unused, state.optimizer), (next(fresh.parameters()), late.optimizer)):
        for parameter in [*used, *list(fresh.parameters())[1:]]:
            parameter.grad = None
        one.grad = torch.ones_like(one)
        optimizer.step()
    assert torch.equal(unused, next(fresh.parameters())), "its first update is a first update"


def test_frozen_parameters_are_left_out() -> None:
    model = Plain()
    model.inner.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OPTIMIZERS["adamw"])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(model.inner.weight) not in held
    assert len(held) == len(list(model.parameters())) - 1
    assert model.inner.weight not in optimizer.state


def test_a_model_of_vectors_alone_has_one_group() -> None:
    assert [g["weight_decay"] for g in build_optimizer(nn.BatchNorm1d(3), OPTIMIZERS["adamw"]).param_groups] == [0.0]


def test_set_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(Plain(), OPTIMIZERS["adamw"])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


CURVES = {
    ("constant", 0): [8] * 12,
    ("constant", 4): [2, 4, 6] + [8] * 9,
    ("linear", 4): [2, 4, 6, 8, 7.25, 6.5, 5.75, 5, 4.25, 3.5, 2.75, 2],
    ("linear", 0): [8 - 0.5 * step for step in range(1, 13)],
    ("cosine", 4): [2, 4, 6, 8, 7.7716, 7.1213, 6.1481, 5, 3.8519, 2.8787, 2.2284, 2],
}


@pytest.mark.parametrize(("name", "warmup"), CURVES)
def test_the_learning_rate_of_every_step(name: Any, warmup: int) -> None:
    spec = Scheduler(name=name, warmup_steps=warmup, min_lr_ratio=0.25)
    rates = [learning_rate(step, 8.0, spec, 12) for step in range(1, 13)]
    assert rates == pytest.approx(CURVES[name, warmup], abs=1e-4)
    if warmup:
        assert rates[warmup - 1] == 8.0, "the peak is reached at the end of the warm-up, not near it"
    if name != "constant":
        assert rates[-1] == 0.25 * 8.0


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_curves_go_down_to_the_ratio_and_never_below(name: Any, ratio: float) -> None:
    spec = Scheduler(name=name, warmup_steps=7, min_lr_ratio=ratio)
    rates = [learning_rate(step, 3e-4, spec, 100) for step in range(7, 120)]
    assert rates[0] == 3e-4
    assert rates[93] == 3e-4 * ratio
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert min(rates) >= 3e-4 * ratio - 1e-18


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [10, 11, 1000])
def test_a_warm_up_as_long_as_the_run_or_longer(name: Any, warmup: int) -> None:
    spec = Scheduler(name=name, warmup_steps=warmup)
    assert [learning_rate(step, 1.0, spec, 10) for step in range(1, 11)] == [step / warmup for step in range(1, 11)]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_run_of_one_step_has_the_last_rate(name: Any) -> None:
    assert learning_rate(1, 1.0, Scheduler(name=name, min_lr_ratio=0.5), 1) == 0.5


@pytest.mark.parametrize(("limit", "scale"), [(None, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_gradients_are_clipped_to_the_limit_and_the_norm_before_is_told(limit: float | None, scale: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(clip_gradients(model.parameters(), limit)) == pytest.approx(5.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[3.0, 4.0]]) * scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 1.0])
def test_no_gradients_have_the_norm_zero(limit: float | None) -> None:
    assert float(clip_gradients(nn.Linear(2, 1).parameters(), limit)) == 0.0


@every_optimizer
def test_an_average_follows_the_weights_and_changes_nothing(spec: AdamW | Sgd) -> None:
    """As torch's own averaged model does it; frozen weights have none, and it is part of the state that is stored."""
    model, plain = Plain(), Plain()
    plain.load_state_dict(model.state_dict())
    optimizer, other = build_optimizer(model, spec, ema=True), build_optimizer(plain, spec)
    reference = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    reference.update_parameters(model)  # its first call copies
    average = Average(optimizer, 0.9)
    for step in range(1, 5):
        for state in (TrainState(model, optimizer), TrainState(plain, other)):
            torch.manual_seed(step)
            update(state, step)
        average.follow()
        reference.update_parameters(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(plain.named_parameters())[name])
        kept = TrainState(model, optimizer).constant().get(f"optimizer.{name}.ema")
        assert (kept is not None) == parameter.requires_grad
        if kept is not None:
            assert torch.allclose(kept, reference.module.get_parameter(name), rtol=1e-6, atol=0)
            assert not torch.equal(kept, parameter) or parameter.grad is None
