"""Which steps are stored where, and what happens when the slow tier does not keep up."""

from __future__ import annotations

import pytest
from tests.engine.build import Plain, Ranks, state_of
from tests.engine.conftest import MakeRanks
from tests.engine.test_snapshot import drain_marks

from dtrain.engine.snapshot.decided import Offered
from dtrain.engine.snapshot.snapshots import Cadence
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.slots import MemoryDir

CADENCES = [
    (Cadence(1, 0, False), [1, 2, 3, 4, 5, 6], []),
    (Cadence(2, 0, False), [2, 4, 6], []),
    (Cadence(1, 3, False), [1, 2, 3, 4, 5, 6], [3, 6]),
    (Cadence(0, 3, False), [3, 6], [3, 6]),
    (Cadence(2, 3, True), [2, 3, 4, 6], [3, 6]),
    (Cadence(0, 0, False), [], []),
]


def begun(memory: MemoryDir, job: Ranks, steps: int, *, busy: bool) -> tuple[list[int], list[int]]:
    """Steps that were stored, and those that were pinned for the drainer."""
    stored_steps, drained = [], []
    (member,) = job.members
    for step in range(1, steps + 1):
        member.begin(step, {}, drain_busy=busy)
        member.finish()
        version = member.superseded()
        if version is not None:
            stored_steps.append(version.step)
        drained += sorted(drain_marks(memory))
        for slot in memory.pending():
            slot.drain_mark.unlink()
    return stored_steps, drained


@pytest.mark.parametrize(("cadence", "expected", "drained"), CADENCES)
def test_steps_are_stored_when_they_are_due(
    memory: MemoryDir, ranks: MakeRanks, cadence: Cadence, expected: list[int], drained: list[int]
) -> None:
    job = ranks(state_of(Plain()), cadence=cadence)
    assert begun(memory, job, 6, busy=False) == (expected, drained)


@pytest.mark.parametrize(("patient", "drained"), [(True, [2, 4]), (False, [])])
def test_a_busy_drainer_is_waited_for_only_when_the_spec_asks_for_it(
    memory: MemoryDir, ranks: MakeRanks, patient: bool, drained: list[int]
) -> None:
    job = ranks(state_of(Plain()), cadence=Cadence(1, 2, patient))
    assert begun(memory, job, 4, busy=True) == ([1, 2, 3, 4], drained)


@pytest.mark.parametrize("patient", [True, False])
def test_it_is_said_whether_a_checkpoint_for_the_slow_tier_was_left_out(ranks: MakeRanks, patient: bool) -> None:
    (member,) = ranks(state_of(Plain()), cadence=Cadence(1, 2, patient), alive=lambda: None).members
    said: list[Offered | None] = []
    for step, busy in [(1, False), (2, False), (3, True), (4, True), (5, True)]:
        said.append(member.begin(step, {}, drain_busy=busy))
        member.finish()
        member.superseded()
        said.append(member.offer(drain_busy=True))
    decided = [offered for offered in said if offered is not None]
    assert decided == [Offered(2, True), Offered(4, patient)]


def test_when_slow_wait_training_waits_for_the_drainer_and_every_due_step_reaches_it(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    """The drainer lets go of the oldest only when the training thread has nothing left to write into."""
    carried: list[int] = []

    def drainer() -> None:
        oldest = min(memory.pending(), key=lambda slot: slot.record().step)  # type: ignore[union-attr]
        carried.append(oldest.record().step)  # type: ignore[union-attr]
        oldest.drain_mark.unlink()

    (member,) = ranks(state_of(Plain()), cadence=Cadence(1, 1, True), alive=drainer).members
    for step in range(1, 9):
        assert member.begin(step, {}, drain_busy=member.draining())
        member.finish()
        member.superseded()
    assert carried == [1, 2, 3, 4, 5]
    assert drain_marks(memory) == {6, 7, 8}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("write", "every", "carried"), [
    (0.9, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    (1.1, 1, [1, 2, 4, 6, 8, 10]),
    (2.1, 1, [1, 3, 6, 9]),
    (1.9, 2, [2, 4, 6, 8, 10]),
    (2.1, 2, [2, 4, 8, 10]),
    (4.5, 2, [2, 8]),
])  # fmt: skip
def test_row_37_when_slow_skip_every_step_that_the_tier_has_time_for_reaches_it_and_training_never_waits(
    memory: MemoryDir, ranks: MakeRanks, world: int, write: float, every: int, carried: list[int]
) -> None:
    """Times are in steps: a snapshot is whole 0.8 after its update, the ranks look at the drainer when a step ends."""

    def waited() -> None:
        raise AssertionError("waited")

    job = ranks(state_of(Plain()), world, cadence=Cadence(1, every, False), alive=waited)
    released: dict[int, float] = {}
    busy, told = False, set[Offered]()
    for step in range(1, 13):
        said = {member.begin(step, {}, drain_busy=busy) for member in job.members}
        for member in job.members:
            member.finish()
        for pinned in drain_marks(memory):
            if released.setdefault(pinned, step + 0.8 + write) <= step + 1:
                release(memory, pinned)
        busy = any(member.draining() for member in job.members)
        for member in job.members:
            assert member.superseded() == Version(1, step)
        offered = {member.offer(drain_busy=busy) for member in job.members}
        for pinned in drain_marks(memory):
            released.setdefault(pinned, step + 1 + write)
        busy |= any(one is not None and one.pinned for one in offered)
        told |= {one for one in (*said, *offered) if one is not None}
        assert max(memory.whole()).step == step
        assert len(drain_marks(memory)) <= 1
    assert [step for step in sorted(released) if step <= carried[-1]] == carried
    assert {one.step for one in told if one.pinned} == set(released)
    assert {one.step for one in told if not one.pinned} == set(range(every, 13, every)) - set(released)


def release(memory: MemoryDir, step: int) -> None:
    for slot in memory.pending():
        if slot.record().step == step:  # type: ignore[union-attr]
            slot.drain_mark.unlink()


def test_a_rank_that_dies_before_it_has_pinned_its_part_leaves_it_to_the_others_marks(
    memory: MemoryDir, ranks: MakeRanks
) -> None:
    """What is pinned on one rank is pinned on all once the workers are gone, for it is whole."""
    job = ranks(state_of(Plain()), 2, cadence=Cadence(1, 1, False))
    for member in job.members:
        member.begin(1, {}, drain_busy=True)
    for member in job.members:
        member.finish()
        member.superseded()
    assert memory.pending() == []
    job.members[0].offer(drain_busy=False)
    assert len(memory.pending()) == 1
    memory.settle()
    assert len(memory.pending()) == 2
    assert drain_marks(memory) == {1}


def test_what_no_rank_keeps_is_offered_to_nobody(memory: MemoryDir, ranks: MakeRanks) -> None:
    (member,) = ranks(state_of(Plain()), cadence=Cadence(1, 1, False)).members
    member.begin(1, {}, drain_busy=True)
    member.finish()
    member.refuse(0)
    assert member.offer(drain_busy=False) is None
    assert memory.pending() == []
