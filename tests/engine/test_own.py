"""A model of one's own with a plan of its own: what is refused, and how its row of modules becomes stages."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.engine.build import job_spec
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from dtrain.engine.entry import UserCodeError, UserCodeFailed
from dtrain.engine.parallel.own import cut, cuts_of, read_plan
from dtrain.specs.models import Spec


class Row(nn.Module):
    """Four layers, the last one small, and a scale of their sum that is never in its place by mistake."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)  # the losses of models that are not the same must differ
        self.enter = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.leave = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.leave(x), y)


NAMES = ["enter", "layers.0", "layers.1", "layers.2", "leave"]
GOOD: dict[str, Any] = {"tp": {"layers.*.0": ColwiseParallel()}, "pp": NAMES, "loss": F.cross_entropy}
BATCH = (torch.randn(8, 4, generator=torch.Generator().manual_seed(5)), torch.tensor([0, 1] * 4))
said: Any = GOOD


def plan(model: nn.Module) -> Any:
    return said


def spec_of(**strategy: int) -> Spec:
    model = {"type": "python", "entry": "tests.engine.test_own:Row", "plan": "tests.engine.test_own:plan"}
    return job_spec(model=model, strategy=strategy, cluster={"device": "cpu", "workers_per_node": 4})


def say(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    import tests.engine.test_own as here  # the copy that the entry names

    monkeypatch.setattr(here, "said", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"returned NoneType, it must return a dict"),
        ({**GOOD, "dp": {}}, r"returned the key 'dp'; there are tp, pp and loss"),
        ({**GOOD, "tp": {}}, r"returned no dict as tp"),
        ({**GOOD, "tp": {"layers.0": "columns"}}, r"gives layers.0 a str in tp"),
        ({**GOOD, "tp": {"layer.0": ColwiseParallel()}}, r"names layer.0 in tp, and the model has no such module"),
        ({**GOOD, "tp": {"layers.0.*.0": ColwiseParallel()}}, r"no such module"),
        ({**GOOD, "loss": None}, r"returned no function as loss"),
        ({**GOOD, "pp": None}, r"returned no list as pp"),
        ({**GOOD, "pp": [*NAMES, "exit"]}, r"names 'exit' in pp, and the model has no such module"),
        ({**GOOD, "pp": [*NAMES, "layers"]}, r"names layers.0 and layers in pp: a module can stand"),
        ({**GOOD, "pp": NAMES[:1]}, r"a row of 1 in pp, and there are 2 stages"),
        ({**GOOD, "pp": NAMES[:-1]}, r"leaves out leave.weight"),
    ],
)
def test_an_answer_that_does_not_fit_the_model_is_refused(
    answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, answer)
    with pytest.raises(UserCodeError, match=rf"^model.plan tests.engine.test_own:plan .*{words}"):
        read_plan(spec_of(tp=2, pp=2), Row())


def test_a_tensor_in_two_modules_of_the_row_is_refused() -> None:
    model = Row()
    model.layers[2][0].weight = model.layers[0][0].weight
    with pytest.raises(UserCodeError, match=r"puts layers.2.0.weight into two modules of pp"):
        read_plan(spec_of(pp=2), model)


def split(model: nn.Module, rank: int, batch: Any = BATCH) -> Any:
    return cut(model, spec_of(pp=2), None, rank, batch, contextlib.nullcontext)


def test_each_rank_keeps_its_stage_under_the_names_of_the_whole() -> None:
    torch.manual_seed(1)
    whole = Row()
    lines = []
    for rank in (0, 1):
        model = Row()
        model.load_state_dict(whole.state_dict())
        lines.append((model, split(model, rank)))
    names = [list(dict(model.named_parameters())) for model, _ in lines]
    assert sorted(names[0] + names[1]) == sorted(dict(whole.named_parameters()))
    cuts = cuts_of(spec_of(pp=2), whole)
    assert cuts is not None
    assert cuts.stages == tuple(map(frozenset, names))
    (first,), (last,) = (line.parts for _, line in lines)
    x, y = lines[0][1].ends(BATCH)
    between = first.module(x)
    assert between.shape == first.leaving.shape == last.entering.shape
    assert first.leaving.is_meta
    assert lines[1][1].loss(last.module(between), y) == whole(*BATCH)


def test_a_row_that_is_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {**GOOD, "pp": ["layers.0", "layers.1", "layers.2", "enter", "leave"]})
    with pytest.raises(UserCodeFailed, match=r"cutting the model as pp says failed: RuntimeError: mat1 and mat2"):
        split(Row(), 0)
    say(monkeypatch, {**GOOD, "pp": ["enter", "layers.1", "layers.0", "layers.2", "leave"]})
    with pytest.raises(UserCodeError, match=r"cut as pp says, the model has a loss of .* is not the same model"):
        split(Row(), 0)


@pytest.mark.parametrize(("batch", "kind"), [({"x": 1}, "dict"), ((*BATCH, 1), "tuple of 3 \\(Tensor, Tensor, int\\)")])
def test_samples_that_are_no_pairs_are_refused(batch: Any, kind: str) -> None:
    class Any_(Row):  # noqa: N801
        def forward(self, *x: Any, **y: Any) -> Tensor:
            return super().forward(*BATCH)

    with pytest.raises(UserCodeError, match=rf"takes samples \(x, y\).* the data set gives {kind}$"):
        split(Any_(), 0, batch)


def test_what_the_planner_is_told_of_torchs_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 4), "up": nn.Linear(4, 4), "down": nn.Linear(4, 4, bias=False)})
    say(monkeypatch, {"tp": {"table": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}})
    cuts = cuts_of(spec_of(tp=2), model)
    assert cuts is not None
    assert cuts.cut_by == {"table.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
    assert cuts_of(spec_of(), model) is None
