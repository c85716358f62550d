"""What both ends of a pipeline hold: it must be the same on both."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.engine.build import state_of

from dtrain.engine.models.gpt import Gpt
from dtrain.engine.parallel.context import Context
from dtrain.engine.parallel.ends import Ends
from dtrain.engine.restore.catalogue import check_ends
from dtrain.engine.snapshot.state import StateError, TrainState
from dtrain.planners.sharding.mesh import Mesh
from dtrain.specs.models import AdamW, GptModel

MODEL = GptModel(type="gpt", n_layers=2, d_model=16, n_heads=2, vocab_size=32, tie_embeddings=True)


class Told:
    """Both ends in one process: what each has said is heard by the other."""

    def __init__(self) -> None:
        self.mesh, self.rank, self.said = Mesh(pp=2), 0, [b"", b""]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.said[self.rank] = data
        return self.said

    def all_agree(self, mine: bool) -> bool:
        return mine


def end() -> TrainState:
    torch.manual_seed(1)
    model = Gpt(MODEL)
    assert model.embedding is not None
    state = state_of(model, AdamW(name="adamw", lr=1e-3))
    weight = cast(torch.nn.Parameter, model.embedding.weight)
    return TrainState(model, state.optimizer, ends=Ends(weight, None))


@pytest.mark.parametrize("key", [None, "weight", "exp_avg"])
def test_ends_that_differ_in_a_bit_are_refused(key: str | None) -> None:
    told, first, last = Told(), end(), end()
    assert last.ends is not None
    parameter = last.ends.parameter
    assert parameter is not None
    if key is not None:
        with torch.no_grad():
            changed = parameter if key == "weight" else last.optimizer.state[parameter][key]
            changed.view(-1)[7] += 1e-6
    context = cast(Context, told)
    told.rank = 1
    with pytest.raises(StateError):
        check_ends(last, context)  # the other end has said nothing yet
    told.rank = 0
    if key is None:
        check_ends(first, context)
    else:
        with pytest.raises(StateError, match="do not hold the same tied embedding"):
            check_ends(first, context)


def test_the_head_is_another_name_on_every_rank() -> None:
    state = end()
    between = TrainState(torch.nn.Linear(2, 2), state.optimizer, ends=Ends(None, None))
    assert state.ties() == between.ties() == {"model.head.weight": "model.embedding.weight"}
