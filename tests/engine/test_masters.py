"""bf16 weights: what is stored of them is fp32 where an update needs it, and nothing of a small update is lost."""

import pytest
import torch
from tests.engine.build import ADAMW, Plain, Tied
from torch import Tensor, nn

from dtrain.engine.optim.masters import MASTER, Masters, lower, updated_by
from dtrain.engine.optim.optimizers import EMA, Average, build_optimizer, clip_gradients
from dtrain.specs.models import AdamW, Sgd

OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": Sgd(name="sgd", lr=1e-2),
    "momentum": Sgd(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1),
}
every_optimizer = pytest.mark.parametrize("spec", OPTIMIZERS.values(), ids=OPTIMIZERS)


def give_gradients(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """The same numbers for models that differ in their dtype."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=source).bfloat16().to(dtype)


@every_optimizer
def test_the_copies_are_an_fp32_training_by_rounded_gradients(spec: AdamW | Sgd) -> None:
    model, reference = nn.Linear(6, 5), nn.Linear(6, 5)
    lower(model)
    with torch.no_grad():
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    optimizer, other = build_optimizer(model, spec, masters=True), build_optimizer(reference, spec)
    for step in range(5):
        give_gradients(model, step, torch.bfloat16)
        give_gradients(reference, step, torch.float32)
        norms = [
            clip_gradients(updated_by(optimizer, model), 1.0), clip_gradients(updated_by(other, reference), 1.0)
        ]  # fmt: skip
        assert torch.equal(*norms)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        kept, wanted = dict(optimizer.state[mine]), other.state.get(theirs, {})
        master = kept.pop(MASTER)
        assert torch.equal(master, theirs)
        assert torch.equal(mine, theirs.bfloat16())
        assert kept.keys() == wanted.keys()
        for key, tensor in kept.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, wanted[key])


def test_updates_smaller_than_a_weights_last_bit_add_up() -> None:
    model = nn.Linear(3, 3, bias=False)
    nn.init.ones_(model.weight)
    lower(model)
    optimizer = build_optimizer(model, Sgd(name="sgd", lr=1e-4), masters=True)
    for _ in range(1000):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(model.weight.float(), torch.full((3, 3), 0.9), atol=2**-8)


def test_a_learning_rate_that_is_set_reaches_the_copies() -> None:
    model = nn.Linear(2, 2)
    lower(model)
    optimizer = build_optimizer(model, ADAMW, masters=True)
    before = [parameter.clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give_gradients(model, 0, torch.bfloat16)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_what_keeps_running_figures_stays_in_fp32_and_is_its_own_copy() -> None:
    model = Plain()
    lower(model)
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32
    assert model.inner.weight.dtype == torch.bfloat16
    optimizer = build_optimizer(model, ADAMW, masters=True)
    assert isinstance(optimizer, Masters)
    assert MASTER not in optimizer.state[model.norm.weight]
    assert optimizer.copies[model.norm.weight] is model.norm.weight
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 4)).backward()
    before = model.norm.weight.clone()
    clip_gradients(updated_by(optimizer, model), None)
    optimizer.step()
    assert not torch.equal(before, model.norm.weight)
    optimizer.zero_grad()
    assert all(tensor.grad is None for tensor in updated_by(optimizer, model))


def test_tied_weights_stay_tied_and_frozen_ones_have_no_copy() -> None:
    model = Tied(tie=True)
    lower(model)
    assert model.head.weight is model.embedding.weight
    both = nn.Sequential(model, nn.Linear(2, 2))
    model.head.weight.requires_grad_(False)
    optimizer = build_optimizer(both, ADAMW, masters=True)
    assert [parameter.shape for parameter in optimizer.state] == [(2, 2), (2,)]
    assert len(updated_by(optimizer, both)) == 3


def test_an_average_is_of_the_copies() -> None:
    model = nn.Linear(4, 4)
    lower(model)
    optimizer = build_optimizer(model, ADAMW, ema=True, masters=True)
    average, expected = Average(optimizer, 0.9), [p.detach().float() for p in model.parameters()]
    for step in range(3):
        give_gradients(model, step, torch.bfloat16)
        optimizer.step()
        average.follow()
        kept = [optimizer.state[p] for p in model.parameters()]
        expected = [torch.lerp(old, one[MASTER], 1 - 0.9) for old, one in zip(expected, kept, strict=True)]
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        found: Tensor = optimizer.state[parameter][EMA]
        assert found.dtype == torch.float32
        assert torch.allclose(found, wanted, rtol=1e-6, atol=0)
