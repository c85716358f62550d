"""Small tensors are copied, hashed and looked at as one, and come back one by one."""

from __future__ import annotations

import pytest
import torch
from tests.engine.build import content, in_memory, scramble, state_of, update
from tests.engine.conftest import MakeRanks
from torch import nn

from dtrain.engine.restore.catalogue import whole_here
from dtrain.engine.restore.restore import restore
from dtrain.engine.snapshot import packs
from dtrain.planners.packing import SMALL_BYTES, runs_of
from dtrain.planners.sharding.shards import Piece, TensorInfo, replicated
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.memory.gather import unread
from dtrain.tiers.memory.slots import MemoryDir


class Many(nn.Module):
    """Small tensors of several forms around one that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ParameterList(nn.Parameter(torch.randn(n % 7)) for n in range(40))
        self.large = nn.Parameter(torch.randn(SMALL_BYTES // 4))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.after = nn.ParameterList(nn.Parameter(torch.randn(2, 3, 2)) for _ in range(40))
        self.short = nn.Parameter(torch.randn(5).bfloat16())


def pieces(*rows: int) -> list[Piece]:
    return [Piece(box, 0, box.rows) for box in replicated([TensorInfo(str(n), "F32", (n,)) for n in rows], 1)]


def test_runs_end_where_something_is_large_or_of_another_kind_or_not_in_rows() -> None:
    given = pieces(1, 2, SMALL_BYTES, 3, 4, 5, 6)
    alike = [0, 0, 0, 0, 0, 1, 1]
    assert runs_of(given, alike, [True] * 7) == [range(2), range(2, 3), range(3, 5), range(5, 7)]
    assert runs_of(given, alike, [True] * 6 + [False]) == [range(2), range(2, 3), range(3, 5), range(5, 6), range(6, 7)]
    assert runs_of([], [], []) == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_they_come_back_as_they_were_of_every_step(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    state = state_of(Many())
    job = ranks(state, world)
    for step in (1, 2, 3):
        update(state, step)
        job.store(step)
    (member, *_) = job.members
    assert len(member.live.items) < len(member.pieces) / 4
    again = state_of(Many())
    scramble(again, 5)
    restore(again, whole_here(again), [in_memory(memory, 3)], 0, lambda mine: mine)
    assert content(again) == content(state)


def test_a_slot_is_described_tensor_by_tensor_whoever_wrote_its_record(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Many())
    ranks(state).store(1)
    ((record,),) = memory.whole().values()
    assert sum(record.runs) == len(unread(memory, record).checked().digests) > len(record.digests)
    path = memory.file_of(record)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unreadable):
        unread(memory, record).checked()


TINY = [0, packs.TINY_BYTES]
"""Nothing is gathered at the boundary; what is tiny is."""


@pytest.mark.parametrize("tiny_bytes", TINY)
@pytest.mark.parametrize("moved", ["weight", "moment", "counter", "all that is kept"])
def test_whatever_an_optimizer_puts_in_place_of_a_tensor_is_what_the_next_snapshot_holds(
    memory: MemoryDir, ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, moved: str, tiny_bytes: int
) -> None:
    """The new one may equal the old one in its numbers, and change only after that."""
    monkeypatch.setattr(packs, "TINY_BYTES", tiny_bytes)
    state = state_of(Many())
    job = ranks(state)
    job.store(1)
    weight = state.model.before[3]
    kept = state.optimizer.state[weight]
    if moved == "weight":
        weight.data = weight.detach().clone()
    elif moved == "moment":
        kept["exp_avg"] = kept["exp_avg"].clone()
    elif moved == "counter":
        kept["step"] = kept["step"].clone()
    else:
        state.optimizer.state[weight] = {key: tensor.clone() for key, tensor in kept.items()}
    for step in (2, 3):
        expected = content(state)
        job.store(step)
        again = state_of(Many())
        scramble(again, step)
        restore(again, whole_here(again), [in_memory(memory, step)], 0, lambda mine: mine)
        assert content(again) == expected
        update(state, step)


@pytest.mark.parametrize("tiny_bytes", TINY)
def test_the_one_that_is_not_finite_is_named(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, tiny_bytes: int
) -> None:
    monkeypatch.setattr(packs, "TINY_BYTES", tiny_bytes)
    state = state_of(Many())
    job = ranks(state)
    kept = state.optimizer.state[state.model.after[7]]
    kept["exp_avg_sq"][1, 2, 0] = float("inf")
    job.take(1)
    (member,) = job.members
    kept["exp_avg_sq"][1, 2, 0] = 0.0 if tiny_bytes else float("inf")  # what was gathered is looked at, not what is now
    member.finish()
    assert member.refused == "optimizer.after.7.exp_avg_sq"


def test_what_is_tiny_is_of_the_boundary_however_a_pass_changes_it(memory: MemoryDir, ranks: MakeRanks) -> None:
    """A write through `.data` leaves no version behind, so what is gathered must not be read again."""
    state = state_of(Many())
    expected = content(state)
    job = ranks(state)
    job.take(1)
    for parameter in state.model.parameters():
        if parameter.numel() < SMALL_BYTES // 4 and parameter is not state.model.turned:
            parameter.data.add_(1)
    job.finish()
    again = state_of(Many())
    scramble(again, 5)
    restore(again, whole_here(again), [in_memory(memory, 1)], 0, lambda mine: mine)
    alone = {"model.turned", "model.short"}  # not packed, so watched as far as versions tell
    assert {n: d for n, d in content(again).items() if n not in alone} == {
        n: d for n, d in expected.items() if n not in alone
    }


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)
def test_gathered_is_what_lies_there_bit_for_bit(dtype: torch.dtype) -> None:
    """Of every width, from anywhere in a tensor, one number or none."""
    whole = torch.arange(60).to(dtype)
    sources = [whole[7:9], torch.zeros(0, dtype=dtype), whole[50], torch.ones((2, 3), dtype=dtype), whole[:1]]
    gathered = packs.Gathered(sources)
    for _ in range(2):
        gathered.fill()
        assert torch.equal(gathered.together, torch.cat([source.reshape(-1) for source in sources]))
        whole.copy_(whole.flip(0))
