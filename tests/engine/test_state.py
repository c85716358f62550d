"""The state by canonical name: names, ties, digests, dtypes, generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.build import CPU, Odd, Plain, Tied, content, gpt, state_of, update
from torch import nn

from dtrain.engine.models.gpt import Gpt
from dtrain.engine.snapshot.state import (
    DTYPE_TAGS,
    StateError,
    TrainState,
    infos,
    random_states,
    same_bytes,
    seed_everything,
    set_random_state,
    tag_of,
    tensor_bytes,
    unexpected,
)
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.specs.dtypes import DTYPE_BYTES
from dtrain.specs.models import Sgd


def test_names_are_those_of_the_module_and_nothing_else() -> None:
    state = state_of(Plain())
    weights = ["inner.weight", "inner.bias", "norm.weight", "norm.bias", "outer.weight", "outer.bias"]
    moments = [f"optimizer.{name}.{key}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")]
    assert list(state.constant()) == [f"model.{name}" for name in weights] + moments
    assert set(state.changing()) == {f"model.norm.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")}


def test_plain_sgd_keeps_nothing_before_and_after_an_update() -> None:
    for momentum, keys in ((0.0, 0), (0.9, 1)):
        state = state_of(Plain(), Sgd(name="sgd", lr=0.1, momentum=momentum))
        update(state, 1)
        assert len(state.constant()) == 6 * (1 + keys)


def test_buffers_that_a_state_dict_leaves_out_are_in() -> None:
    state = state_of(Odd())
    assert "unsaved" not in state.model.state_dict()
    assert "model.unsaved" in state.changing()


def test_the_tensors_are_the_live_ones() -> None:
    state = state_of(Odd())
    update(state, 1)
    for name, parameter in state.model.named_parameters():
        assert state.constant()[f"model.{name}"].data_ptr() == parameter.data_ptr()
    assert state.changing()["model.count"] is state.model.count


def test_moving_parameters_change_places_but_not_the_digest() -> None:
    """What the forward pass changes itself is no constant, whatever it is registered as."""
    plain = state_of(Plain())
    state = TrainState(plain.model, plain.optimizer, frozenset({"model.inner.weight"}))
    assert set(plain.constant()) - set(state.constant()) == {"model.inner.weight"}
    assert set(state.changing()) - set(plain.changing()) == {"model.inner.weight"}
    assert state.digest() == plain.digest()
    assert content(state) == content(plain)


def test_every_constant_tensor_is_found_where_it_is_said_to_be() -> None:
    state = state_of(Odd())
    update(state, 1)
    places = state.places()
    for name, tensor in state.constant().items():
        parameter, key = places[name]
        found = parameter if key is None else state.optimizer.state[parameter][key]
        assert found.data_ptr() == tensor.data_ptr()
        assert found.shape == tensor.shape


def test_same_bytes_compares_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert same_bytes(nan, nan.clone())
    assert same_bytes(torch.zeros(2, 3).t(), torch.zeros(3, 2))
    assert not same_bytes(zero, -zero)
    assert not same_bytes(zero, torch.zeros(1, dtype=torch.int32))
    assert not same_bytes(zero, torch.zeros(1, 1))


def test_a_state_that_is_no_tensor_is_refused_by_name() -> None:
    state = state_of(Plain())
    state.optimizer.state[state.model.inner.weight]["history"] = [1, 2]
    with pytest.raises(StateError, match=r"keeps a list as 'history' of inner\.weight"):
        state.constant()


def test_row_64_ties_are_found_by_identity_and_stored_once() -> None:
    """Rows 64 and 65."""
    tied, apart = state_of(Tied(True)), state_of(Tied(False))
    assert tied.ties() == {"model.head.weight": "model.embedding.weight"}
    assert apart.ties() == {}
    assert "model.head.weight" not in tied.constant()
    assert "model.head.weight" in apart.constant()


def test_three_names_of_one_parameter_lead_to_the_first() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c")})
    model["b"].weight = model["c"].weight = model["a"].weight
    assert state_of(model).ties() == {"model.b.weight": "model.a.weight", "model.c.weight": "model.a.weight"}


class Shuffled(nn.Module):
    """The same tensors, registered in another order."""

    def __init__(self, names: list[str], values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name in names:
            if name.startswith("b"):
                self.register_buffer(name, values[name].clone())
            else:
                self.register_parameter(name, nn.Parameter(values[name].clone()))


def test_the_digest_does_not_depend_on_the_order() -> None:
    values = {name: torch.randn(3, 2) for name in ("p1", "p2", "p3", "b1", "b2")}
    digests = set()
    for names in (["p1", "p2", "p3", "b1", "b2"], ["b2", "p3", "p1", "b1", "p2"]):
        state = state_of(Shuffled(names, values))
        for name, parameter in state.model.named_parameters():
            state.optimizer.state[parameter]["exp_avg"].fill_(int(name[1]))
        digests.add(state.digest())
    assert len(digests) == 1


def test_the_digest_sees_every_bit_and_every_name() -> None:
    values = {name: torch.randn(3, 2) for name in ("p1", "p2", "b1")}
    state = state_of(Shuffled(list(values), values))
    seen = {state.digest()}
    for tensor in (state.constant() | state.changing()).values():
        flat = tensor.reshape(-1)
        kept = flat[0].item()
        flat[0] = kept + 1
        seen.add(state.digest())
        flat[0] = kept
    assert len(seen) == 1 + len(state.constant()) + len(state.changing())
    swapped = state_of(Shuffled(list(values), {"p1": values["p2"], "p2": values["p1"], "b1": values["b1"]}))
    assert swapped.digest() not in seen


def test_the_digest_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    model = nn.Conv2d(3, 4, 3)
    before = state_of(model).digest()
    assert state_of(model.to(memory_format=torch.channels_last)).digest() == before


def test_zero_and_minus_zero_differ() -> None:
    values = {"p": torch.zeros(2)}
    plus, minus = state_of(Shuffled(["p"], values)), state_of(Shuffled(["p"], {"p": -values["p"]}))
    assert plus.digest() != minus.digest()


def test_every_tag_has_the_size_of_its_dtype() -> None:
    assert sorted(DTYPE_TAGS.values()) == sorted(DTYPE_BYTES)
    for dtype, tag in DTYPE_TAGS.items():
        tensor = torch.zeros(3, dtype=dtype)
        assert tag_of(tensor, "x") == tag
        assert len(tensor_bytes(tensor)) == 3 * DTYPE_BYTES[tag]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
def test_a_dtype_without_a_tag_is_refused_by_name(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("odd", torch.zeros(2, dtype=dtype))
    with pytest.raises(StateError, match=rf"model\.odd has dtype {dtype}"):
        infos(TrainState(model, torch.optim.SGD([torch.zeros(1)])).changing())


@pytest.mark.parametrize("dtype", DTYPE_TAGS, ids=str)
def test_row_50_bytes_are_the_row_major_bytes(dtype: torch.dtype) -> None:
    """Row 50: no detour over a library that lacks the dtype."""
    raw = bytes(range(2)) * 48 if dtype == torch.bool else random.randbytes(96)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype)
    assert bytes(tensor_bytes(flat)) == raw
    square = flat.reshape(2, -1)
    turned = square.t().contiguous().t()
    assert not turned.is_contiguous() or min(turned.shape) == 1
    assert bytes(tensor_bytes(turned)) == raw
    assert bytes(tensor_bytes(flat[-1])) == raw[-flat.element_size() :]
    assert bytes(tensor_bytes(flat[:0])) == b""


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0),
    "two of nothing": lambda: torch.zeros(2, 0),
    "bf16": lambda: torch.randn(5, 3).bfloat16(),
    "turned": lambda: torch.randn(5, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(9)[::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "backwards": lambda: torch.randn(4).flip(0),
    "inside": lambda: torch.randn(6, 4)[2:4, 1:3],
    "with a gradient": lambda: torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_gives_its_values(form: str) -> None:
    """Rows 66 and 67."""
    tensor = FORMS[form]()
    raw = bytearray(tensor_bytes(tensor))
    assert len(raw) == tensor.numel() * tensor.element_size()
    if raw:
        assert torch.equal(torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape), tensor)


def test_no_copy_is_made_of_what_lies_right() -> None:
    tensor = torch.zeros(4)
    view = tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


def draws() -> list[Any]:
    """A little of every generator."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        np.random.permutation(9).tolist(),
        torch.rand(5).tolist(),
        torch.randn(17).tolist(),
        torch.nn.functional.dropout(torch.ones(40), 0.5).tolist(),
        torch.randperm(9).tolist(),
    ]


@pytest.mark.parametrize("drawn_before", range(4))
def test_generators_go_on_where_they_were(drawn_before: int) -> None:
    """Also with the half of a Gaussian pair pending, which Python and NumPy keep."""
    for _ in range(drawn_before):
        draws()
    if drawn_before % 2:
        random.gauss(0, 1)
        np.random.standard_normal()
    kept = random_states(CPU)
    expected = [draws(), draws()]
    for name, data in kept.items():
        set_random_state(name, data)
    assert random_states(CPU) == kept
    assert [draws(), draws()] == expected


def test_each_generator_is_put_back_alone() -> None:
    kept = random_states(CPU)
    draws()
    moved = random_states(CPU)
    assert set(kept) == {"rng.python", "rng.numpy", "rng.torch"}
    for name in kept:
        assert kept[name] != moved[name]
        set_random_state(name, kept[name])
        now = random_states(CPU)
        assert now[name] == kept[name]
        assert {n for n in now if now[n] == moved[n]} == set(kept) - {name}
        set_random_state(name, moved[name])


def test_random_states_keep_their_size() -> None:
    """Slots are laid out once; a pending Gaussian must not need room."""
    sizes = set()
    for _ in range(5):
        sizes.add(tuple(len(data) for data in random_states(CPU).values()))
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(3)
    assert len(sizes) == 1


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1])
def test_ranks_draw_differently_and_a_seed_draws_the_same(seed: int) -> None:
    drawn = []
    for rank in (None, 0, 1, 2, None, 1):
        seed_everything(seed, rank)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[4]
    assert drawn[2] == drawn[5]
    for source in zip(*drawn[:4], strict=True):
        assert len(set(source)) == 4


def test_differences_are_a_line_each() -> None:
    stored = {n: TensorInfo(n, "F32", (2,)) for n in ("same", "gone", "shape", "dtype")}
    live = {
        "same": stored["same"],
        "new": TensorInfo("new", "F32", ()),
        "shape": TensorInfo("shape", "F32", (3,)),
        "dtype": TensorInfo("dtype", "BF16", (2,)),
    }
    assert sorted(unexpected(stored, live)) == [
        "different: dtype is F32 [2] in the checkpoint, BF16 [2] in the model",
        "different: shape is F32 [2] in the checkpoint, F32 [3] in the model",
        "missing in the checkpoint: new F32 []",
        "not in the model: gone F32 [2]",
    ]
    assert list(unexpected(stored, stored)) == []


def test_a_tied_decoder_stores_its_head_once() -> None:
    tied, apart = (state_of(Gpt(gpt(tie_embeddings=tie))) for tie in (True, False))
    sizes = [sum(map(len, content(state).values())) for state in (tied, apart)]
    assert sizes[1] - sizes[0] == 3 * 64 * 32 * 4 + 4


def test_buffers_are_found_wherever_one_or_a_module_comes_goes_or_is_replaced() -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))

    model = nn.Sequential(nn.Linear(2, 2), norm(), nn.Linear(2, 2))
    model[2].shared = model[1][0].running_mean  # no buffer, and no change
    state = state_of(model)
    changes: list[Callable[[], object]] = [
        lambda: model[0].register_buffer("new", torch.zeros(1)),
        lambda: setattr(model[0], "new", torch.ones(1)),
        lambda: setattr(model[0], "new", None),
        lambda: model[1].add_module("last", norm()),
        lambda: model[1].last.register_buffer("late", torch.zeros(1), persistent=False),
        lambda: model[1].__setitem__(0, nn.BatchNorm1d(2)),
        lambda: model[2].register_buffer("twice", model[1][0].running_var),
        lambda: model[1].__delattr__("last"),
    ]
    for change in [lambda: None, *changes]:
        change()
        expected, found = dict(model.named_buffers()), state.buffers.find()
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)
