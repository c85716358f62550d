"""What all nodes can go on from: a table of what they may hold, and every loss of one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers.build import put

from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.reading.agree import (
    Held,
    Shards,
    agreed,
    between_nodes,
    common,
    held_from_json,
    look,
    newest,
    to_drain,
    with_memory_of_all,
)
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place

V1, V2, V3 = (Version(attempt=1, step=step) for step in (1, 2, 3))
MEMORY, DISK, FAR = Place("memory", "/dev/shm/x"), Place("disk", "/shared/run"), Place("object", "s3://b/run")


@pytest.fixture
def memory(tmp_path: Path) -> MemoryDir:
    """Of node 1, which has rank 1 of 2."""
    return MemoryDir(tmp_path, (1,))


def held(*memory: Version, pinned: tuple[Version, ...] = (), disk: tuple[Version, ...] | None = None) -> Held:
    return Held(frozenset(memory), frozenset(pinned), {} if disk is None else {"disk": frozenset(disk)})


def test_the_newest_that_all_have_is_chosen_and_what_is_passed_over_is_told() -> None:
    candidates = [Candidate(V3, MEMORY), Candidate(V2, MEMORY), Candidate(V2, DISK), Candidate(V1, DISK)]
    chosen, passed = agreed(candidates, {0: held(V2, V3, disk=(V1, V2)), 1: held(V1, V2, disk=(V1,))})
    assert [(one.version, one.tier) for one in chosen] == [(V2, "memory"), (V1, "disk")]
    assert [(one["tier"], one["step"]) for one in passed] == [("memory", 3), ("disk", 2)]
    assert passed[0]["reason"] == "node 1 does not have its part of it in memory"
    assert "node 1 does not see /shared/run/step-0000000002.a0001: the folder is not shared" in passed[1]["reason"]


def test_an_object_store_and_a_disk_that_nobody_looked_into_are_for_all() -> None:
    candidates = [Candidate(V2, FAR), Candidate(V1, DISK)]
    assert agreed(candidates, {0: held(), 1: held()})[0] == candidates


def test_the_order_of_the_candidates_is_kept() -> None:
    """A later attempt continues what it restored, so its steps go first, however small."""
    later = Version(attempt=2, step=1)
    candidates = [Candidate(later, MEMORY), Candidate(V3, MEMORY)]
    assert agreed(candidates, {0: held(V3, later), 1: held(V3, later)})[0] == candidates


Versions = frozenset[Version]
versions = st.frozensets(st.sampled_from([V1, V2, V3]))


@given(st.lists(st.tuples(versions, versions), min_size=1, max_size=5), st.data())
def test_nothing_is_whole_without_every_node(nodes: list[tuple[Versions, Versions]], data: st.DataObject) -> None:
    everyone = {node: Held(memory, pinned & memory) for node, (memory, pinned) in enumerate(nodes)}
    whole = common(everyone, len(nodes))
    assert all(whole <= one.memory for one in everyone.values())
    assert newest(everyone, len(nodes)) == max(whole, default=None)
    assert to_drain(everyone, len(nodes)) <= whole
    chosen, passed = agreed([Candidate(v, MEMORY) for v in (V3, V2, V1)], everyone)
    assert {one.version for one in chosen} == whole and len(chosen) + len(passed) == 3
    gone = data.draw(st.sampled_from(sorted(everyone)))
    rest = {node: one for node, one in everyone.items() if node != gone}
    assert common(rest, len(nodes)) == frozenset() and newest(rest, len(nodes)) is None


def test_what_a_node_holds_goes_through_a_message() -> None:
    shards = {V1: Shards(4, frozenset({0, 3}))}
    before = replace(held(V1, V2, pinned=(V2,), disk=(V1,)), shards=shards)
    assert held_from_json(before.to_json()) == before


def test_a_node_looks_at_its_own_ranks_alone(memory: MemoryDir) -> None:
    put(memory, 1, 2, 0, step=4, attempt=3, drain=True)
    found = look(memory, [])
    version = Version(attempt=3, step=4)
    assert found == Held(frozenset({version}), frozenset({version}), {}, 3, {version: Shards(2, frozenset({1}))})
    assert look(MemoryDir(memory.path, (0,)), []).memory == frozenset()


def test_marks_are_set_and_taken_away_as_all_nodes_have_agreed(memory: MemoryDir) -> None:
    put(memory, 1, 2, 0, step=1, drain=True)
    put(memory, 1, 2, 1, step=2)
    memory.settle({V2})
    assert [record.step for slot in memory.pending() if (record := slot.record())] == [2]


def with_shards(shards: dict[Version, set[int]], *memory: Version, world: int = 2) -> Held:
    return Held(frozenset(memory), shards={v: Shards(world, frozenset(ranks)) for v, ranks in shards.items()})


def test_what_a_node_has_lost_and_another_has_a_copy_of_is_a_candidate_of_the_peer_tier() -> None:
    candidates = [Candidate(V3, MEMORY), Candidate(V2, MEMORY), Candidate(V1, DISK)]
    held = {0: with_shards({V3: {0}, V2: {0, 1}}, V2, V3), 1: with_shards({})}
    chosen, passed = agreed(candidates, held)
    assert [(one.version, one.tier, one.place.url) for one in chosen] == [
        (V2, "peer", MEMORY.url), (V1, "disk", DISK.url),
    ]  # fmt: skip
    assert [one["step"] for one in passed] == [3]


def test_copies_count_only_when_every_shard_is_somewhere() -> None:
    assert between_nodes({0: with_shards({V1: {0}}, world=3), 1: with_shards({V1: {1}}, world=3)}) == frozenset()
    third = with_shards({V1: {2, 0}, V2: {2}}, world=3)
    everyone = {0: with_shards({V1: {0}}, world=3), 1: with_shards({V1: {1}}, world=3), 2: third}
    assert between_nodes(everyone) == {V1}


def test_what_all_nodes_have_themselves_stays_a_candidate_of_the_memory_tier() -> None:
    held = {node: with_shards({V1: {0, 1}}, V1) for node in range(2)}
    assert agreed([Candidate(V1, MEMORY)], held) == ([Candidate(V1, MEMORY)], [])


def test_a_look_into_memory_finds_copies_that_are_kept_for_others(memory: MemoryDir, tmp_path: Path) -> None:
    put(memory, 1, 2, 0, step=1)
    kept = memory.replica_of(0)
    kept.path.mkdir()
    put(kept, 0, 2, 1, step=2)
    found = look(memory, [])
    assert found.memory == {V1}
    assert found.shards == {V1: Shards(2, frozenset({1})), V2: Shards(2, frozenset({0}))}
    assert held_from_json(found.to_json()) == found


def test_what_node_0_has_lost_is_found_again_in_the_memory_of_all(tmp_path: Path) -> None:
    """Node 0 is new: it knows of the disk alone, and a copy of its shard is on node 1."""
    held = {0: with_shards({}), 1: with_shards({V3: {0, 1}, V2: {1}}, V2, V3)}
    candidates = with_memory_of_all([Candidate(V2, DISK), Candidate(V1, DISK)], held, MemoryDir(tmp_path))
    assert [(one.version, one.tier) for one in candidates] == [(V3, "memory"), (V2, "disk"), (V1, "disk")]
    chosen, passed = agreed(candidates, held)
    assert [(one.version, one.tier) for one in chosen] == [(V3, "peer"), (V2, "disk"), (V1, "disk")]
    assert not passed
    again, _ = agreed(chosen, held)
    assert again == chosen, "what was agreed once is no other candidate later"


def test_after_a_change_of_nodes_whoever_has_the_shards_gives_them() -> None:
    """Three nodes had one each; two of them are left, then a new one comes that has nothing."""
    of_three = [{V3: Shards(3, frozenset({rank}))} for rank in range(3)]
    of_two = [{V2: Shards(2, frozenset({rank}))} for rank in range(2)]
    candidates = [Candidate(V3, MEMORY), Candidate(V2, MEMORY)]
    nodes = {node: replace(held(), shards={**of_three[node], **of_two[node]}) for node in range(2)}
    assert [one.version for one in agreed(candidates, {**nodes, 2: held()})[0]] == [V2]
    found, _ = agreed(candidates, {**nodes, 2: replace(held(), shards=of_three[2])})
    assert [(one.version, one.tier) for one in found] == [(V3, "peer"), (V2, "peer")]


def test_snapshots_of_the_former_number_of_nodes_are_needed_until_there_are_others(tmp_path: Path) -> None:
    """A run that has just changed its number of nodes and ends at once leaves them for the next start."""
    now = MemoryDir(tmp_path / "memory", (0,), world=3)
    now.path.mkdir()
    put(now, 0, 2, 0, 5)
    assert now.whole() == {}
    now.remove_unneeded()
    assert now.path.is_dir()
    MemoryDir(tmp_path / "memory", (1,), world=None).remove_unneeded()
    assert not now.path.is_dir(), "of a fixed number only one's own count"
