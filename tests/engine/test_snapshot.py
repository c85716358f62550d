"""Snapshots: slots that are never overwritten too early, and content of exactly one step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from tests.engine.build import (
    RUN_ID,
    GatedMover,
    Odd,
    Plain,
    content,
    in_memory,
    state_of,
    update,
)
from tests.engine.conftest import MakeRanks
from tests.tiers.build import digest_of
from torch import nn

from dtrain.engine.snapshot.copier import HostMover, Item
from dtrain.engine.snapshot.slot import SlotError
from dtrain.engine.snapshot.snapshots import Pace
from dtrain.engine.snapshot.state import StateError, TrainState, infos, tensor_bytes
from dtrain.specs.models import Sgd
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.shardfile import ShardReader
from dtrain.tiers.memory.slots import SLOTS, MemoryDir
from dtrain.tiers.reading.recovery import contents, open_candidate, verify

WATCHED = 512
"""Width of layers whose tensors are not tiny: they are copied in the windows, and watched meanwhile."""


def stored(memory: MemoryDir, step: int, attempt: int = 1) -> dict[str, bytes]:
    """Everything in memory of a step, put together from its shards; generators as `rng.x of rank`."""
    found: dict[str, list[tuple[tuple[int, ...], bytes]]] = {}
    for piece in contents(open_candidate(in_memory(memory, step, attempt))):
        name = piece.name if piece.is_state else f"{piece.name} of {piece.rank}"
        found.setdefault(name, []).append((piece.offset, bytes(piece.data)))
        piece.data.release()
    return {name: b"".join(data for _, data in sorted(parts)) for name, parts in found.items()}


def state_part(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if not name.startswith("rng.")}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [Plain, Odd])
def test_a_snapshot_holds_every_byte_of_its_step(
    memory: MemoryDir, ranks: MakeRanks, make: Callable[[], nn.Module], world: int
) -> None:
    state = state_of(make())
    job = ranks(state, world)
    for step in (1, 2, 3, 4):
        update(state, step)
        expected, digest = content(state), state.digest()
        job.store(step)
        assert state_part(stored(memory, step)) == expected
        assert digest_of(open_candidate(in_memory(memory, step))) == digest


def test_bytes_are_divided_once_each(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state, 3)
    total = sum(info.nbytes for info in infos(state.constant() | state.changing()))
    pieces = [sum(piece.nbytes for piece in member.pieces) for member in job.members]
    assert sum(pieces) == sum(info.nbytes for info in infos(state.constant()))
    assert max(pieces) - min(pieces) <= 2 * 8 * 4, "nearly the same for each"
    own = sum(member.shard.data_bytes for member in job.members)
    assert own - total == 3 * sum(entry.nbytes for entry in job.members[1].shard.entries if not entry.is_state)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_buffers_belong_to_rank_0_and_generators_to_each(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    """Row 62: no rank's generators stand in for another's."""
    state = state_of(Plain())
    job = ranks(state, world)
    job.store(1)
    for member in job.members:
        names = [entry.name for entry in member.shard.entries]
        assert ("model.norm.running_mean" in names) == (member.rank == 0)
        assert [name for name in names if name.startswith("rng.")] == ["rng.python", "rng.numpy", "rng.torch"]
    found = stored(memory, 1)
    for name in ("rng.python", "rng.numpy", "rng.torch"):
        assert len({found[f"{name} of {rank}"] for rank in range(world)}) == world


def test_more_ranks_than_rows(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Rows 51 and 67: a shard without a byte of the model is as good as any."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(()))
            self.none = nn.Parameter(torch.zeros(0))
            self.neither = nn.Parameter(torch.zeros(2, 0))

    state = state_of(Small())
    job = ranks(state, 9)
    assert any(not member.pieces for member in job.members)
    for step in (1, 2):
        update(state, step)
        expected = content(state)
        job.store(step)
        assert state_part(stored(memory, step)) == expected


def test_a_model_without_any_state(memory: MemoryDir, ranks: MakeRanks) -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 3))

    job = ranks(state_of(Nothing(), Sgd(name="sgd", lr=0.1)), 2)
    job.store(1)
    assert state_part(stored(memory, 1)) == {"model.none": b""}


def test_only_a_step_that_all_ranks_have_is_whole(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state, 3)
    job.store(1)
    job.take(2)
    for member in job.members[:2]:
        member.finish()
    assert set(memory.whole()) == {Version(1, 1)}
    job.finish()
    assert set(memory.whole()) == {Version(1, 1), Version(1, 2)}


def test_the_record_tells_position_and_ties_for_rank_0(memory: MemoryDir, ranks: MakeRanks) -> None:
    job = ranks(state_of(Plain()), 2)
    job.store(3)
    records = memory.whole()[Version(1, 3)]
    assert records[0].meta == {"ties": {}, "data": {"samples": 48}}
    assert records[1].meta == {}
    assert [(r.run_id, r.step, r.rank, r.world) for r in records] == [(RUN_ID, 3, 0, 2), (RUN_ID, 3, 1, 2)]


def test_finish_tells_the_bytes_and_superseded_the_version_once(ranks: MakeRanks) -> None:
    (member,) = ranks(state_of(Plain())).members
    assert (member.finish(), member.superseded()) == (0, None)
    member.take(1, {}, drain=False)
    assert member.finish() == member.shard.data_bytes > 0
    assert member.superseded() == Version(1, 1)
    assert (member.finish(), member.superseded()) == (0, None)


class Hesitant(HostMover):
    """Waits a little before and after each slice, so that a copy lasts as long as its step."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        time.sleep(self.random.choice((0.0, 0.0, 0.0002)))
        super().move(item, position, nbytes, target)


@pytest.mark.parametrize("world", [1, 2])
def test_two_hundred_paced_copies_are_their_own_step(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    """Rows 41 and 42: moments, counters and weights of one update, buffers and generators of its boundary."""
    state = state_of(Plain(width=4))
    job = ranks(state, world, pace=Pace(forward_bytes=96, backward_bytes=160, slice_bytes=64))
    for member in job.members:
        member.copier.mover = Hesitant()
    under_way = 0
    for step in range(1, 201):
        update(state, step)
        expected = content(state)
        job.take(step)
        for _ in range(2):
            for member in job.members:
                member.forward_window()
            state.model(torch.randn(4, 4))  # moves the running mean, the counter and torch's generator
            random.random()
            for member in job.members:
                member.backward_window()
            under_way += any(member.copier.busy for member in job.members)
        job.finish()
        assert content(state) != expected, "buffers have changed in between"
        update(state, step + 1000)
        found = stored(memory, step)
        assert state_part(found) == expected
        steps = {data for name, data in found.items() if name.endswith(".step")}
        assert len(steps) == 1, "every counter of the same update"
    assert under_way > 200, "the copies did last into the windows"


@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_that_runs_into_the_next_update_is_refused(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    """The counter-test of the one above: without the wait before the update the copy is a mix, and says so."""
    state = state_of(Plain(WATCHED))
    job = ranks(state, world)
    job.store(1)
    expected = content(state)
    movers = [GatedMover() for _ in job.members]
    for member, mover in zip(job.members, movers, strict=True):
        member.copier.mover = mover
    job.take(2)
    update(state, 2)
    for member, mover in zip(job.members, movers, strict=True):
        mover.gate.set()
        with pytest.raises(StateError, match="was changed during a forward or backward pass"):
            member.finish()
    assert set(memory.whole()) == {Version(1, 1)}
    assert state_part(stored(memory, 1)) == expected


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_parameter_that_a_pass_changes_is_refused_by_name(memory: MemoryDir, ranks: MakeRanks, how: str) -> None:
    state = state_of(Plain(WATCHED))
    job = ranks(state)
    job.take(1)
    with torch.no_grad():
        if how == "in place":
            state.model.outer.weight.mul_(0.5)
        else:
            state.model.outer.weight.data = state.model.outer.weight * 0.5
    with pytest.raises(StateError, match=r"^model\.outer\.weight was changed during"):
        job.finish()
    assert memory.whole() == {}


def test_what_is_written_after_the_copy_is_refused_as_it_would_be_in_a_slower_one(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    state = state_of(Plain(WATCHED))
    job = ranks(state)
    job.take(1)
    (member,) = job.members
    member.copier.finish()
    state.model.outer.weight.detach().mul_(0.5)
    with pytest.raises(StateError, match=r"^model\.outer\.weight was changed during"):
        job.finish()
    assert memory.whole() == {}


def test_a_mix_is_not_saved_by_a_step_that_fails_either(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain(WATCHED))
    job = ranks(state)
    mover = GatedMover()
    job.members[0].copier.mover = mover
    job.take(1)
    update(state, 1)
    mover.gate.set()
    job.members[0].salvage()
    assert memory.whole() == {}


def test_moving_parameters_are_copied_at_the_boundary_by_rank_0(memory: MemoryDir, ranks: MakeRanks) -> None:
    """What the forward pass itself changes, like the teacher of a model that teaches itself."""
    plain = state_of(Plain())
    state = TrainState(plain.model, plain.optimizer, frozenset({"model.outer.weight"}))
    job = ranks(state, 2)
    assert "model.outer.weight" not in {piece.tensor.name for member in job.members for piece in member.pieces}
    for step in (1, 2, 3):
        expected, digest = content(state), state.digest()
        job.take(step)
        with torch.no_grad():
            state.model.outer.weight.mul_(0.5)
        job.finish()
        assert state_part(stored(memory, step)) == expected
        assert digest_of(open_candidate(in_memory(memory, step))) == digest


def test_generators_and_buffers_are_those_of_the_boundary(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state)
    mover = GatedMover()
    job.members[0].copier.mover = mover
    job.take(1)
    job.members[0].forward_window()
    before = torch.get_rng_state(), state.model.norm.running_mean.clone()
    state.model(torch.randn(8, 4))
    mover.gate.set()
    job.finish()
    found = stored(memory, 1)
    assert found["rng.torch of 0"] == bytes(tensor_bytes(before[0]))
    assert found["model.norm.running_mean"] == bytes(tensor_bytes(before[1]))
    assert not torch.equal(state.model.norm.running_mean, before[1])


def test_buffers_that_a_pass_replaces_are_found_anew(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Odd())
    job = ranks(state)
    for step in (1, 2, 3):
        state.model.count = state.model.count + 1
        job.store(step)
        assert stored(memory, step)["model.count"] == bytes(tensor_bytes(torch.tensor(step)))


def test_a_buffer_that_changes_its_shape_is_refused(memory: MemoryDir, ranks: MakeRanks) -> None:
    """The slots are laid out once; bytes of another layout would be a checkpoint that nobody can read."""
    state = state_of(Odd())
    job = ranks(state)
    job.store(1)
    for other in (torch.zeros(2), torch.zeros(5), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        state.model.unsaved = other
        with pytest.raises(StateError, match=r"model\.unsaved was F32 \[3\] and is "):
            job.take(2)
    assert set(memory.whole()) == {Version(1, 1)}


def test_a_buffer_that_comes_or_goes_is_refused(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Odd())
    job = ranks(state)
    state.model.register_buffer("zz", torch.zeros(2))
    with pytest.raises(StateError):
        job.take(1)
    del state.model.zz, state.model.unsaved
    with pytest.raises(StateError):
        job.take(1)
    assert memory.whole() == {}


def test_finish_raises_what_the_copy_raised_and_the_older_step_stays(memory: MemoryDir, ranks: MakeRanks) -> None:
    class Broken(HostMover):
        def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
            raise OSError(5, "Input/output error")

    state = state_of(Plain())
    job = ranks(state)
    job.store(1)
    expected = stored(memory, 1)
    (member,) = job.members
    member.copier.mover = Broken()
    member.take(2, {}, drain=False)
    with pytest.raises(OSError, match="Input/output"):
        member.finish()
    member.salvage()
    assert set(memory.whole()) == {Version(1, 1)}
    assert stored(memory, 1) == expected


def test_a_step_that_fails_leaves_its_copy_complete(memory: MemoryDir, ranks: MakeRanks) -> None:
    job = ranks(state_of(Plain()), 2)
    job.take(1)
    for member in job.members:
        member.salvage()
    verify(open_candidate(in_memory(memory, 1)))


@pytest.mark.parametrize("world", [1, 3])
def test_the_newest_whole_version_is_never_overwritten(memory: MemoryDir, ranks: MakeRanks, world: int) -> None:
    """Looked at while each rank's copy is held open, and between the ends of two ranks."""
    state = state_of(Plain())
    job = ranks(state, world)
    expected: dict[str, bytes] = {}
    for step in range(1, 13):
        update(state, step)
        movers = []
        for member in job.members:
            movers.append(GatedMover())
            member.copier.mover = movers[-1]
        job.take(step)
        for member, mover in zip(job.members, movers, strict=True):
            if step > 1:
                assert Version(1, step - 1) in memory.whole()
                assert state_part(stored(memory, step - 1)) == expected
            mover.gate.set()
            member.finish()
        job.finish()
        expected = content(state)
    assert len(memory.all_slots()) <= SLOTS * world


def test_what_is_said_to_be_whole_is_whole_while_a_slot_is_written(memory: MemoryDir, ranks: MakeRanks) -> None:
    """The old record goes before the first new byte comes."""
    state = state_of(Plain())
    job = ranks(state)
    for step in range(1, 8):
        update(state, step)
        mover = GatedMover()
        job.members[0].copier.mover = mover
        job.take(step)
        for version in memory.whole():
            verify(open_candidate(in_memory(memory, version.step)))
        assert Version(1, step) not in memory.whole()
        mover.gate.set()
        job.finish()


def test_a_rank_that_is_ahead_does_not_touch_what_the_others_still_need(memory: MemoryDir, ranks: MakeRanks) -> None:
    """One rank has step 5 already, the other dies in it: step 4 is what the job goes back to."""
    state = state_of(Plain())
    job = ranks(state, 2)
    for step in (3, 4):
        update(state, step)
        job.store(step)
    expected = content(state)
    update(state, 5)
    job.take(5)
    job.members[0].finish()
    assert max(memory.whole()) == Version(1, 4)
    again = ranks(state, 2, attempt=2, restored=Version(1, 4))
    assert set(memory.whole()) == {Version(1, 4)}
    assert state_part(stored(memory, 4)) == expected
    update(state, 6)
    again.store(5)
    assert max(memory.whole()) == Version(2, 5)


def drain_marks(memory: MemoryDir) -> set[int]:
    return {record.step for slot in memory.pending() if (record := slot.record()) is not None}


def test_pinned_slots_are_never_chosen(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state, 2)
    job.store(10, drain=True)
    expected = stored(memory, 10)
    for step in range(11, 20):
        update(state, step)
        job.store(step)
        assert {Version(1, 10), Version(1, step)} <= set(memory.whole())
        assert stored(memory, 10) == expected
    assert drain_marks(memory) == {10}
    assert all(member.draining() for member in job.members)


def test_with_all_slots_taken_a_rank_waits_and_says_that_it_lives(memory: MemoryDir, ranks: MakeRanks) -> None:
    calls = 0

    def alive() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            released = next(slot for slot in memory.pending() if slot.record().step == 2)  # type: ignore[union-attr]
            released.drain_mark.unlink()

    state = state_of(Plain())
    job = ranks(state, alive=alive)
    for step in (1, 2, 3):
        update(state, step)
        job.store(step, drain=True)
    assert calls == 0
    kept = {step: stored(memory, step) for step in (1, 3)}
    job.store(4)
    assert calls == 3
    assert {step: stored(memory, step) for step in (1, 3)} == kept
    assert set(memory.whole()) == {Version(1, step) for step in (1, 3, 4)}
    assert drain_marks(memory) == {1, 3}


def test_the_newest_whole_version_is_waited_for_even_when_no_slot_is_pinned(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    """Two pinned slots and the newest version: nothing is free until the drainer lets go of one."""
    released: list[int] = []

    def alive() -> None:
        slot = memory.pending()[0]
        released.append(slot.record().step)  # type: ignore[union-attr]
        slot.drain_mark.unlink()

    job = ranks(state_of(Plain()), alive=alive)
    job.store(1, drain=True)
    job.store(2, drain=True)
    job.store(3)
    job.store(4)
    assert len(released) == 1
    assert {Version(1, 3), Version(1, 4)} <= set(memory.whole())
    assert Version(1, released[0]) not in memory.whole()


@pytest.mark.parametrize("world", [1, 2])
def test_a_new_attempt_keeps_what_it_restored_and_drops_the_rest(
    memory: MemoryDir, ranks: MakeRanks, world: int
) -> None:
    state = state_of(Plain())
    job = ranks(state, world)
    for step in (1, 2, 3):
        update(state, step)
        job.store(step)
    expected = stored(memory, 2)
    again = ranks(state, world, attempt=2, restored=Version(1, 2))
    assert set(memory.whole()) == {Version(1, 2)}
    for step in (3, 4, 5):
        again.take(step)
        if step == 3:
            assert stored(memory, 2) == expected, "until it is superseded"
        again.finish()
    assert max(memory.whole()) == Version(2, 5)


def test_an_attempt_from_the_beginning_drops_everything(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state)
    for step in (1, 2, 3):
        job.store(step)
    ranks(state, attempt=2)
    assert memory.whole() == {}


def test_what_the_drainer_still_carries_is_not_dropped(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    job = ranks(state)
    job.store(1, drain=True)
    job.store(2)
    job.store(3)
    expected = stored(memory, 1)
    ranks(state, attempt=2, restored=Version(1, 3))
    assert set(memory.whole()) == {Version(1, 1), Version(1, 3)}
    assert stored(memory, 1) == expected


def test_slots_of_another_world_go_when_this_one_has_its_first_snapshot(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    ranks(state, 3).store(4)
    job = ranks(state, 2, attempt=2, restored=Version(1, 4))
    job.take(5)
    for member in job.members:
        member.finish()
    assert Version(1, 4) in memory.whole(), "until every rank has the new one"
    job.finish()
    assert set(memory.whole()) == {Version(2, 5)}
    assert not [path.name for path in memory.path.iterdir() if "-of-00003" in path.name]


def test_a_slot_of_another_layout_is_made_anew(memory: MemoryDir, ranks: MakeRanks) -> None:
    ranks(state_of(Plain(width=8))).store(1)
    state = state_of(Plain(width=9))
    job = ranks(state, attempt=2, restored=Version(1, 1))
    assert memory.whole() == {}, "its record speaks of other bytes"
    expected = content(state)
    job.store(2)
    assert state_part(stored(memory, 2, attempt=2)) == expected


def test_a_slot_of_as_many_bytes_for_other_tensors_is_made_anew(memory: MemoryDir, ranks: MakeRanks) -> None:
    named = {name: nn.ModuleDict({name: nn.Linear(3, 2)}) for name in ("one", "two")}
    ranks(state_of(named["one"])).store(1)
    size = memory.slots(0, 1)[0].file.stat().st_size
    state = state_of(named["two"])
    job = ranks(state, attempt=2, restored=Version(1, 1))
    assert memory.slots(0, 1)[0].file.stat().st_size == size
    assert memory.whole() == {}
    job.store(2)
    assert state_part(stored(memory, 2, attempt=2)) == content(state)


def test_a_slot_that_was_cut_is_made_anew(memory: MemoryDir, ranks: MakeRanks) -> None:
    state = state_of(Plain())
    ranks(state).store(1)
    for slot in memory.slots(0, 1):
        with slot.file.open("r+b") as file:
            file.truncate(4096)
    job = ranks(state, attempt=2, restored=Version(1, 1))
    assert memory.whole() == {}
    job.store(2)
    verify(open_candidate(in_memory(memory, 2, attempt=2)))


def test_slots_are_taken_in_full_before_the_first_step(memory: MemoryDir, ranks: MakeRanks) -> None:
    (member,) = ranks(state_of(Plain())).members
    for slot in memory.slots(0, 1):
        info = slot.file.stat()
        assert info.st_size == len(member.header) + member.shard.data_bytes
        assert info.st_blocks * 512 >= info.st_size
        assert info.st_mode & 0o777 == 0o600
        with ShardReader(slot.file) as reader:
            assert reader.shard == member.shard
    assert memory.whole() == {}


def test_a_link_in_the_place_of_a_slot_is_refused(memory: MemoryDir, ranks: MakeRanks) -> None:
    other = memory.path / "other"
    other.write_bytes(b"precious")
    memory.slots(0, 1)[0].file.symlink_to(other)
    with pytest.raises(SlotError):
        ranks(state_of(Plain()))
    assert other.read_bytes() == b"precious"


def test_windows_grant_what_the_plan_says(ranks: MakeRanks) -> None:
    (member,) = ranks(state_of(Plain()), pace=Pace(100, 300, 50)).members
    granted: list[int] = []
    member.copier.grant = granted.append  # type: ignore[method-assign]
    member.forward_window()
    member.backward_window()
    assert granted == [100, 300]


def test_memory_does_not_grow_with_the_steps(memory: MemoryDir, ranks: MakeRanks) -> None:
    """Row 44: the same slots again and again."""
    job = ranks(state_of(Plain()), 2)
    job.store(1)
    before = {path.name for path in memory.path.iterdir() if not path.name.endswith((".json", ".drain"))}
    for step in range(2, 30):
        job.store(step)
    after = {path.name for path in memory.path.iterdir() if not path.name.endswith((".json", ".drain"))}
    assert after == before
    assert len(after) == 2 * SLOTS
