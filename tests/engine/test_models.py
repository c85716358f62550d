"""One way to call every module, and what is said of those that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.engine.build import CPU, Plain, gpt
from torch import Tensor, nn
from torch.utils.data import default_collate

from dtrain.engine.entry import UserCodeError
from dtrain.engine.models.build import build_model, compute_loss, to_device
from dtrain.engine.models.gpt import Gpt
from dtrain.specs.models import PythonModel


class Answers(nn.Module):
    """Returns what it is told to, and keeps what it was called with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.called = arguments, keywords
        return self.answer


ONE, TWO = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("batch", "arguments", "keywords"),
    [
        (ONE, (ONE,), {}),
        ((ONE, TWO), (ONE, TWO), {}),
        ([ONE, TWO], (ONE, TWO), {}),
        ({"x": ONE, "y": TWO}, (), {"x": ONE, "y": TWO}),
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_a_batch_becomes_arguments(batch: Any, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
    model = Answers(torch.tensor(2.5))
    assert float(compute_loss(model, batch)) == 2.5
    assert len(model.called[0]) == len(arguments)
    assert all(a is b for a, b in zip(model.called[0], arguments, strict=True))
    assert model.called[1] == keywords


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor


LOSS = torch.tensor(2.5, requires_grad=True)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        LOSS.reshape(1),
        LOSS.reshape(1, 1),
        Output(LOSS, ONE),
        Pair(ONE, LOSS),
        SimpleNamespace(loss=LOSS),
        {"logits": ONE, "loss": LOSS},
    ],
    ids=["number", "one", "one by one", "dataclass", "named tuple", "attribute", "dict"],
)
def test_the_loss_is_found_and_can_be_differentiated(output: Any) -> None:
    loss = compute_loss(Answers(output), ONE)
    assert loss.shape == ()
    LOSS.grad = None
    loss.backward()
    assert LOSS.grad == 1


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (torch.ones(0), r"a tensor of shape \(0,\)"),
        (None, "NoneType"),
        (1.5, "float"),
        ({"logits": ONE}, "NoneType"),
        ((LOSS, ONE), "tuple"),
        (SimpleNamespace(loss=None), "NoneType"),
    ],
)
def test_anything_else_is_refused_with_what_it_was(output: Any, got: str) -> None:
    with pytest.raises(UserCodeError, match=f"must return its mean loss .one number., it returned {got}"):
        compute_loss(Answers(output), ONE)


def test_collated_samples_of_every_form_reach_the_model() -> None:
    for sample in (ONE, (ONE, 1), {"x": ONE, "label": 1}):
        batch = to_device(default_collate([sample] * 2), CPU)
        model = Answers(torch.tensor(1.0))
        compute_loss(model, batch)
        sent = [*model.called[0], *model.called[1].values()]
        assert sent[0].shape == (2, 3)


def test_tensors_move_and_the_rest_stays() -> None:
    meta = torch.device("meta")
    moved = to_device({"a": ONE, "b": [ONE, "text", (ONE, 3)], "c": None}, meta)
    assert moved["a"].device == moved["b"][0].device == moved["b"][2][0].device == meta
    assert (moved["b"][1], moved["b"][2][1], moved["c"]) == ("text", 3, None)


def test_models_are_built_from_their_block() -> None:
    assert isinstance(build_model(gpt()), Gpt)
    made = build_model(PythonModel(type="python", entry="tests.engine.build:mlp", kwargs={"width": 5}))
    assert isinstance(made, Plain)
    assert made.inner.out_features == 5


def test_an_entry_that_makes_no_module_is_refused() -> None:
    with pytest.raises(
        UserCodeError, match=r"tests\.engine\.build:points returned points, it must return an nn.Module"
    ):
        build_model(PythonModel(type="python", entry="tests.engine.build:points"))
