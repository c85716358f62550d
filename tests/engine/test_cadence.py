"""Which steps are stored where, and what happens when the slow tier does not keep up."""

from __future__ import annotations

import pytest
from tests.engine.build import Plain, Ranks, state_of
from tests.engine.conftest import MakeRanks
from tests.engine.test_snapshot import drain_marks

from dtrain.engine.snapshot import Cadence
from dtrain.tiers.memory import MemoryDir

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
    said = []
    for step, busy in [(1, False), (2, False), (3, True), (4, True)]:
        said.append(member.begin(step, {}, drain_busy=busy))
        member.finish()
        member.superseded()
    assert said == [None, True, None, patient]


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


def test_when_slow_skip_training_never_waits_for_the_drainer(memory: MemoryDir, ranks: MakeRanks) -> None:
    def drainer() -> None:
        raise AssertionError("waited")

    (member,) = ranks(state_of(Plain()), cadence=Cadence(1, 1, False), alive=drainer).members
    said = []
    for step in range(1, 9):
        said.append(member.begin(step, {}, drain_busy=member.draining()))
        member.finish()
        member.superseded()
        assert max(memory.whole()).step == step
        if step == 5:
            for slot in memory.pending():
                slot.drain_mark.unlink()
    assert said == [True, False, False, False, False, True, False, False]
    assert drain_marks(memory) == {6}
