"""Layers as units: found in every model, computed again or compiled without another name for anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.engine.models.gpt import Gpt
from dtrain.engine.parallel.units import compile_units, recompute, units
from dtrain.specs.models import GptModel

SPEC = GptModel(type="gpt", n_layers=3, d_model=16, n_heads=2, vocab_size=64)


class Stacked(nn.Module):
    """Two stacks of layers, one inside another module, and a list inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        inner = nn.Module()
        inner.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.blocks = nn.ModuleList([inner])
        self.head = nn.Sequential(nn.Linear(4, 2))


def test_the_outermost_modules_in_lists_are_the_layers() -> None:
    model = Stacked()
    layers = [model.get_submodule(f"encoder.layers.{number}") for number in range(2)]
    assert units(model) == [*layers, *model.blocks]
    gpt = Gpt(SPEC)
    assert units(gpt) == list(gpt.layers.values())
    assert units(nn.Linear(2, 2)) == []


def test_row_70_names_are_the_model_s_own_whatever_is_around_a_layer() -> None:
    """Row 70."""
    model = Gpt(SPEC)
    names = list(model.state_dict())
    recompute(model)
    compile_units(model)
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]


def test_computed_again_a_layer_gives_the_same_loss_and_gradients() -> None:
    torch.manual_seed(3)
    model = Gpt(SPEC.model_copy(update={"dropout": 0.2}))
    tokens = torch.randint(64, (2, 9))
    found: list[tuple[Tensor, list[Tensor]]] = []
    for again in (False, True):
        if again:
            recompute(model)
        torch.manual_seed(5)
        loss = model(tokens)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.detach(), list(gradients)))
    (first, plain), (second, recomputed) = found
    assert torch.equal(first, second)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
