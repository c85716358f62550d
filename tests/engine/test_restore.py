"""Restore: bit for bit, or refused in words; what is damaged gives way to the next candidate."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.build import (
    RUN_ID,
    Odd,
    Plain,
    Ranks,
    Tied,
    content,
    in_memory,
    scramble,
    state_of,
    update,
)
from tests.engine.conftest import MakeRanks
from torch import nn

from dtrain.engine.restore.catalogue import whole_here
from dtrain.engine.restore.restore import MAX_SHOWN, NothingUsable, Restored, restore
from dtrain.engine.snapshot.state import DTYPE_TAGS, StateError, TrainState, seed_everything
from dtrain.specs.models import Sgd
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import MemoryDir, Slot
from dtrain.tiers.reading.recovery import Candidate, find
from dtrain.tiers.tier import disk_tier


def mine(ok: bool) -> bool:
    """The agreement of a world of one."""
    return ok


def load(state: TrainState, *candidates: Candidate, rank: int = 0) -> Restored:
    return restore(state, whole_here(state), candidates, rank, mine)


def fresh(make: Callable[[], nn.Module]) -> TrainState:
    """Another state of the same form, with no tensor the same."""
    state = state_of(make())
    scramble(state, 99)
    return state


def draws() -> tuple[float, ...]:
    """The next numbers of every generator."""
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))


def slot_of(memory: MemoryDir, step: int, rank: int = 0) -> Slot:
    record = memory.whole()[Version(1, step)][rank]
    return Slot(memory.path, rank, record.world, record.slot)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage(job: Ranks, step: int, name: str, rank: int = 0) -> None:
    """Turn one bit of what one rank stores of a tensor."""
    shard = job.members[rank].shard
    (index,) = [i for i, entry in enumerate(shard.entries) if entry.name == name]
    slot = slot_of(job.memory, step, rank)
    flip(slot.file, len(shard.header()) + shard.offsets()[index])


@pytest.mark.parametrize(
    "make", [Plain, Odd, lambda: Tied(True), lambda: Tied(False)], ids=["plain", "odd", "tied", "not"]
)
@pytest.mark.parametrize("world", [1, 2, 3, 11])
def test_everything_comes_back_bit_for_bit(
    memory: MemoryDir, ranks: MakeRanks, make: Callable[[], nn.Module], world: int
) -> None:
    state = state_of(make())
    job = ranks(state, world)
    for step in (1, 2):
        update(state, step)
        job.store(step)
    expected, digest = content(state), state.digest()
    again = fresh(make)
    forms = {name: (t.stride(), t.data_ptr()) for name, t in (again.constant() | again.changing()).items()}
    restored = load(again, in_memory(memory, 2))
    assert content(again) == expected
    assert again.digest() == digest
    assert (restored.candidate.version, restored.skipped) == (Version(1, 2), [])
    assert restored.meta["data"] == {"samples": 32}
    assert {name: (t.stride(), t.data_ptr()) for name, t in (again.constant() | again.changing()).items()} == forms


def test_training_goes_on_as_if_nothing_had_been(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    data = torch.randn(6, 8, 4)

    def train(state: TrainState, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = state.model(data[step % 6])
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
        return losses

    train(state, range(3))
    ranks(state).store(3)
    expected = train(state, range(3, 12))
    again = fresh(Plain)
    draws()
    load(again, in_memory(memory, 3))
    assert train(again, range(3, 12)) == expected
    assert content(again) == content(state)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_row_62_each_rank_draws_on_from_where_it_was(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    """Row 62."""
    state = state_of(Plain())
    ranks(state, world).store(5)
    expected = []
    for rank in range(world):
        seed_everything(5, rank)
        expected.append(draws())
    assert len(set(expected)) == world
    for rank in range(world):
        seed_everything(1234)
        restored = load(fresh(Plain), in_memory(memory, 5), rank=rank)
        assert not restored.fresh_random
        assert draws() == expected[rank]


def test_a_rank_that_was_not_there_keeps_its_own_generators_and_says_so(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    ranks(state, 2).store(1)
    seed_everything(8)
    before = draws()
    seed_everything(8)
    again = fresh(Plain)
    seed_everything(8)
    assert load(again, in_memory(memory, 1), rank=2).fresh_random
    assert draws() == before
    assert content(again) == content(state)


@pytest.mark.parametrize("dtype", DTYPE_TAGS, ids=str)
def test_every_dtype_comes_back(memory: MemoryDir, ranks: MakeRanks, dtype: torch.dtype) -> None:
    """Row 50."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))
            raw = bytes(i % 2 for i in range(96)) if dtype == torch.bool else np.random.bytes(96)
            flat = torch.frombuffer(bytearray(raw), dtype=dtype)
            self.register_buffer("rows", flat.clone())
            self.register_buffer("turned", flat.reshape(2, -1).t().clone(memory_format=torch.preserve_format))
            self.register_buffer("one", flat[0].clone())

    state = state_of(Typed())
    ranks(state, 2).store(1)
    again = state_of(Typed())
    assert content(again) != content(state)
    load(again, in_memory(memory, 1))
    assert content(again) == content(state)


@pytest.mark.parametrize("frozen", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_in_other_precisions_keep_them(memory: MemoryDir, ranks: MakeRanks, frozen: torch.dtype) -> None:
    def make() -> nn.Module:
        model = Plain()
        model.inner.to(frozen)
        return model

    state = state_of(make(), Sgd(name="sgd", lr=0.1, momentum=0.9))
    update(state, 1)
    ranks(state, 3).store(1)
    again = state_of(make(), Sgd(name="sgd", lr=0.1, momentum=0.9))
    load(again, in_memory(memory, 1))
    assert content(again) == content(state)
    assert again.constant()["optimizer.inner.weight.momentum_buffer"].dtype == frozen


def test_shared_weights_stay_shared(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Tied(True))
    ranks(state, 2).store(1)
    again = fresh(lambda: Tied(True))
    load(again, in_memory(memory, 1))
    assert again.model.head.weight is again.model.embedding.weight
    assert torch.equal(again.model.head.weight, state.model.head.weight)


def test_parameters_that_move_come_back_as_the_rest(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Whether a parameter counted as moving is not told in the checkpoint, and need not be."""
    plain = state_of(Plain())
    moving = frozenset({"model.inner.weight", "model.norm.bias"})
    ranks(TrainState(plain.model, plain.optimizer, moving), 3).store(1)
    for live in (moving, frozenset[str]()):
        again = fresh(Plain)
        load(TrainState(again.model, again.optimizer, live), in_memory(memory, 1))
        assert content(again) == content(plain)


def test_another_world_reads_the_same_state(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Odd())
    expected = content(state)
    ranks(state, 5).store(1)
    again = fresh(Odd)
    load(again, in_memory(memory, 1))
    ranks(again, 2, attempt=2, restored=Version(1, 1)).store(2)
    third = fresh(Odd)
    load(third, in_memory(memory, 2, attempt=2))
    assert content(third) == expected


def test_the_disk_gives_what_memory_held(memory: MemoryDir, ranks: MakeRanks, tmp_path: Path) -> None:
    state = state_of(Odd())
    update(state, 1)
    ranks(state, 3).store(7)
    disk = disk_tier(tmp_path / "checkpoints", RUN_ID)
    disk.write(*gather(memory, memory.whole()[Version(1, 7)]))
    memory.remove()
    (candidate,) = find(memory, [disk]).candidates
    assert candidate.tier == "disk"
    again = fresh(Odd)
    restored = load(again, candidate, rank=2)
    assert content(again) == content(state)
    assert restored.meta["data"] == {"samples": 7 * 16}
    after = draws()
    seed_everything(7, 2)
    assert draws() == after


class Renamed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.outer
        del self.outer


class Shaped(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, 2)


class Short(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.outer.weight = nn.Parameter(self.outer.weight.detach().bfloat16())


class Counted(Plain):
    """The same number of bytes in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.running_mean = torch.zeros(8, dtype=torch.int32)


class Fuller(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("extra", torch.zeros(3))


REFUSED = {
    "renamed layer": (
        Renamed,
        [
            "missing in the checkpoint: model.other.weight F32 [1, 8]",
            "missing in the checkpoint: optimizer.other.weight.exp_avg F32 [1, 8]",
            "not in the model: model.outer.weight F32 [1, 8]",
        ],
    ),
    "other shape": (
        Shaped,
        ["different: model.outer.weight is F32 [1, 8] in the checkpoint, F32 [2, 8] in the model"],
    ),
    "other dtype": (
        Short,
        ["different: model.outer.weight is F32 [1, 8] in the checkpoint, BF16 [1, 8] in the model"],
    ),
    "other dtype of the same size": (
        Counted,
        ["different: model.norm.running_mean is F32 [8] in the checkpoint, I32 [8] in the model"],
    ),
    "one buffer more": (Fuller, ["missing in the checkpoint: model.extra F32 [3]"]),
}


@pytest.mark.parametrize(("make", "lines"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("world", [1, 3])
def test_row_72_another_model_is_refused_with_every_difference(
    memory: MemoryDir, ranks: MakeRanks, make: Callable[[], nn.Module], lines: list[str], world: int
) -> None:
    """Row 72: no strict load that falls back to a part."""
    job = ranks(state_of(Plain()), world)
    job.store(1)
    job.store(2)
    live = fresh(make)
    before = torch.get_rng_state()
    with pytest.raises(StateError) as caught:
        load(live, in_memory(memory, 2), in_memory(memory, 1))
    assert str(caught.value).startswith("the checkpoint of step 2 (attempt 1) belongs to another model:")
    for line in lines:
        assert line in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_written_into_a_tensor_of_another_dtype(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    scramble(state, 3)
    ranks(state).store(1)
    live = state_of(Counted())
    with pytest.raises(StateError):
        load(live, in_memory(memory, 1))
    assert not live.model.norm.running_mean.any()


def test_a_model_with_fewer_tensors_is_refused_too(memory: MemoryDir, ranks: MakeRanks) -> None:
    ranks(state_of(Fuller())).store(1)
    with pytest.raises(StateError, match=r"not in the model: model\.extra F32 \[3\]"):
        load(fresh(Plain), in_memory(memory, 1))


def test_another_optimizer_is_refused(memory: MemoryDir, ranks: MakeRanks) -> None:
    ranks(state_of(Plain())).store(1)
    for spec in (Sgd(name="sgd", lr=0.1), Sgd(name="sgd", lr=0.1, momentum=0.5)):
        with pytest.raises(StateError, match=r"not in the model: optimizer\.inner\.bias\.exp_avg "):
            load(state_of(Plain(), spec), in_memory(memory, 1))


def test_row_59_other_frozen_parameters_are_refused_by_name(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Row 59: as many moments of the same shapes, but of other layers."""

    def frozen(name: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model.get_submodule(name).requires_grad_(False)
        return model

    ranks(state_of(frozen("0"))).store(1)
    with pytest.raises(StateError) as caught:
        load(state_of(frozen("2")), in_memory(memory, 1))
    assert "missing in the checkpoint: optimizer.0.weight.exp_avg F32 [3, 3]" in str(caught.value)
    assert "not in the model: optimizer.2.weight.exp_avg F32 [3, 3]" in str(caught.value)


@pytest.mark.parametrize(("saved", "live"), [(True, False), (False, True)])
def test_row_64_ties_must_be_the_same(memory: MemoryDir, ranks: MakeRanks, saved: bool, live: bool) -> None:
    """Row 64."""
    ranks(state_of(Tied(saved))).store(1)
    with pytest.raises(StateError, match="tied tensors are"):
        load(state_of(Tied(live)), in_memory(memory, 1))


def test_a_tie_to_another_tensor_is_seen_by_its_name_alone(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Names, shapes and dtypes are the same; only what the weight is tied to differs."""

    def make(second: str) -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c")})
        model["d"] = nn.Module()
        model["d"].weight = model[second].weight
        return model

    ranks(state_of(make("a"))).store(1)
    load(state_of(make("a")), in_memory(memory, 1))
    with pytest.raises(
        StateError, match=r"tied tensors are \{'model\.d\.weight': 'model\.a\.weight'\} in the checkpoint"
    ):
        load(state_of(make("b")), in_memory(memory, 1))


def test_many_differences_are_shortened_and_counted(memory: MemoryDir, ranks: MakeRanks) -> None:
    ranks(state_of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))).store(1)
    with pytest.raises(StateError) as caught:
        load(state_of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))), in_memory(memory, 1))
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1].strip() == f"… and {4 * 2 * 4 - MAX_SHOWN} more"


DAMAGE: dict[str, Callable[[Ranks, Slot], None]] = {
    "a byte of a weight": lambda job, slot: damage(job, 2, "model.inner.weight"),
    "a byte of a counter": lambda job, slot: damage(job, 2, "optimizer.outer.bias.step", rank=job.world - 1),
    "a byte of a buffer": lambda job, slot: damage(job, 2, "model.norm.running_var"),
    "a byte of a generator": lambda job, slot: damage(job, 2, "rng.torch"),
    "a byte of the header": lambda job, slot: flip(slot.file, 20),
    "a byte of the header's end": lambda job, slot: flip(slot.file, 4095),
    "a byte of its length": lambda job, slot: flip(slot.file, 7),
    "a byte of the record": lambda job, slot: flip(slot.record_file, 40),
    "the last byte gone": lambda job, slot: slot.file.write_bytes(slot.file.read_bytes()[:-1]),
    "a byte more": lambda job, slot: slot.file.write_bytes(slot.file.read_bytes() + b"x"),
    "an empty file": lambda job, slot: slot.file.write_bytes(b""),
    "no file": lambda job, slot: slot.file.unlink(),
    "no record": lambda job, slot: slot.record_file.unlink(),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_damaged_gives_way_to_the_step_before(
    memory: MemoryDir, ranks: MakeRanks, harm: Callable[[Ranks, Slot], None], world: int
) -> None:
    """Promise 3. Whatever was read of the damaged one leaves no trace, in the generators neither."""
    state = state_of(Plain())
    job = ranks(state, world)
    update(state, 1)
    job.store(1)
    expected = content(state)
    seed_everything(1, 0)
    drawn = draws()
    update(state, 2)
    job.store(2)
    harm(job, slot_of(memory, 2))
    again = fresh(Plain)
    restored = load(again, in_memory(memory, 2), in_memory(memory, 1))
    assert restored.candidate.version == Version(1, 1)
    assert content(again) == expected
    assert draws() == drawn
    (skipped,) = restored.skipped
    assert (skipped["tier"], skipped["step"], skipped["attempt"]) == ("memory", 2, 1)
    assert len(skipped["reason"]) > 10


def test_the_reason_names_file_and_tensor(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Small tensors that lie together are read together, and named from the first to the last."""
    state = state_of(Plain(2048))
    job = ranks(state, 2)
    job.store(1)
    job.store(2)
    damage(job, 2, "model.inner.weight")
    restored = load(fresh(lambda: Plain(2048)), in_memory(memory, 2), in_memory(memory, 1))
    path = slot_of(memory, 2).file
    assert restored.skipped[0]["reason"] == f"{path}: model.inner.weight does not match its digest"


def test_when_all_are_damaged_nothing_is_usable_and_all_are_listed(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state)
    for step in (1, 2):
        job.store(step)
        damage(job, step, "model.outer.bias")
    with pytest.raises(NothingUsable) as caught:
        load(fresh(Plain), in_memory(memory, 2), in_memory(memory, 1), in_memory(memory, 9))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no checkpoint can be read whole:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  step 2 (memory)", "  step 1 (memory)", "  step 9 (memory)"]
    assert "model.inner.weight to optimizer.outer.bias.exp_avg_sq do not match the commit record" in lines[1]
    assert "step 9 (attempt 1) is no longer whole" in lines[3]


def test_row_47_what_another_rank_cannot_read_is_passed_over_here_too(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Row 47: one version for all ranks."""
    state = state_of(Plain())
    job = ranks(state, 2)
    job.store(1)
    expected = content(state)
    update(state, 2)
    job.store(2)
    said: list[bool] = []

    def agree(ok: bool) -> bool:
        said.append(ok)
        return ok and len(said) > 1

    again = fresh(Plain)
    restored = restore(again, whole_here(again), [in_memory(memory, 2), in_memory(memory, 1)], 1, agree)
    assert said == [True, True]
    assert content(again) == expected
    assert [(s["step"], s["reason"]) for s in restored.skipped] == [(2, "another rank could not read it")]


def test_this_rank_tells_the_others_what_it_cannot_read(memory: MemoryDir, ranks: MakeRanks) -> None:
    job = ranks(state_of(Plain()), 2)
    job.store(1)
    job.store(2)
    damage(job, 2, "model.inner.bias")
    said: list[bool] = []

    def agree(ok: bool) -> bool:
        said.append(ok)
        return ok

    again = fresh(Plain)
    restore(again, whole_here(again), [in_memory(memory, 2), in_memory(memory, 1)], 0, agree)
    assert said == [False, True]


def test_nothing_of_the_candidate_is_kept_by_the_state(memory: MemoryDir, ranks: MakeRanks) -> None:
    """The slots are written again soon after."""
    state = state_of(Odd())
    job = ranks(state)
    job.store(1)
    expected = content(state)
    again = fresh(Odd)
    load(again, in_memory(memory, 1))
    for slot in memory.slots(0, 1):
        slot.file.write_bytes(b"\xff" * slot.file.stat().st_size)
    assert content(again) == expected


def test_a_copy_of_the_model_can_be_restored_beside_it(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    update(state, 1)
    ranks(state).store(1)
    twin = state_of(copy.deepcopy(state.model))
    before: dict[str, Any] = content(state)
    update(state, 2)
    load(twin, in_memory(memory, 1))
    assert content(twin) == before
    assert content(state) != before
