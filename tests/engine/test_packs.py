"""Small tensors are copied, hashed and looked at as one, and come back one by one."""

from __future__ import annotations

import pytest
import torch
from tests.engine.build import content, in_memory, scramble, state_of, update
from tests.engine.conftest import MakeRanks
from torch import nn

from dtrain.engine.catalogue import whole_here
from dtrain.engine.packs import SMALL_BYTES, runs_of
from dtrain.engine.restore import restore
from dtrain.planners.shards import Piece, TensorInfo, replicated
from dtrain.tiers.gather import unread
from dtrain.tiers.jsonfile import Unreadable
from dtrain.tiers.memory import MemoryDir


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
    assert len(member.items) < len(member.pieces) / 4
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


def test_one_that_is_put_elsewhere_between_two_steps_is_found_there(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Many())
    job = ranks(state)
    job.store(1)
    weight = state.model.before[3]
    weight.data = torch.full_like(weight, 7.0)
    job.store(2)
    again = state_of(Many())
    restore(again, whole_here(again), [in_memory(memory, 2)], 0, lambda mine: mine)
    assert torch.equal(again.model.before[3], weight)
