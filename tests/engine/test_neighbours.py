"""Small tensors are moved side by side only where nobody else would see them go."""

from __future__ import annotations

import pytest
import torch
from tests.engine.build import content, state_of
from torch import Tensor, nn

from dtrain.engine.optim.neighbours import ALIGNMENT, lay_side_by_side
from dtrain.engine.snapshot.state import TrainState
from dtrain.planners.packing import SMALL_BYTES


class Mixed(nn.Module):
    """Small weights around a large one, one of another dtype, one that is a part of a buffer, one seen by an array."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (5, 3, 0, 7))
        self.large = nn.Parameter(torch.randn(SMALL_BYTES // 4))
        self.after = nn.ParameterList(nn.Parameter(torch.randn(2, 3)) for _ in range(3))
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("whole", torch.randn(8))
        self.part = nn.Parameter(self.whole[2:6])
        self.seen = nn.Parameter(torch.randn(6))
        self.array = self.seen.detach().numpy()


def state() -> TrainState:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model, optimizer)


def end_of(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def test_they_are_the_same_objects_with_the_same_bytes_and_lie_in_the_order_of_a_snapshot() -> None:
    given = state()
    model, kept = given.model, given.optimizer.state
    assert isinstance(model, Mixed)
    objects, before = [list(kept[parameter].values()) for parameter in model.parameters()], content(given)
    lay_side_by_side(given.optimizer, given.model)
    assert content(given) == before
    for parameter in (model.before[0], *model.after):
        step, mean, square = kept[parameter].values()
        assert (end_of(step), end_of(mean)) == (mean.data_ptr(), square.data_ptr())
        assert parameter.data_ptr() % ALIGNMENT == 0
    assert end_of(kept[model.after[0]]["exp_avg_sq"]) == kept[model.after[1]]["step"].data_ptr()
    assert model.after[1].data_ptr() == model.after[0].data_ptr() + ALIGNMENT
    now = [list(kept[parameter].values()) for parameter in model.parameters()]
    assert [list(map(id, tensors)) for tensors in now] == [list(map(id, tensors)) for tensors in objects]


def test_what_somebody_else_holds_the_memory_of_stays_where_it_is() -> None:
    given = state()
    model = given.model
    view = model.before[1].data
    lay_side_by_side(given.optimizer, model)
    with torch.no_grad():
        for parameter in (model.part, model.seen, model.before[1]):
            parameter.fill_(3.0)
    assert model.whole[2:6].tolist() == [3.0] * 4
    assert model.array.tolist() == [3.0] * 6
    assert view.tolist() == [3.0] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_those_of_tensors_that_lie_apart(fused: bool) -> None:
    """Kernels may sum and round otherwise where memory begins at an odd place; these do not."""
    told = []
    for moved in (False, True):
        torch.manual_seed(1)
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        given = TrainState(model, optimizer)
        for step in range(4):
            if step == 1 and moved:
                lay_side_by_side(optimizer, model)
            loss = torch.stack([((p.float() * (step + 1)) ** 3).sum() for p in model.parameters()]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        told.append(content(given))
    assert told[0] == told[1]


def test_the_optimizer_that_a_run_builds_is_laid_so() -> None:
    given = state_of(Mixed())
    step, mean, square = given.optimizer.state[given.model.after[1]].values()
    assert (end_of(step), end_of(mean)) == (mean.data_ptr(), square.data_ptr())
