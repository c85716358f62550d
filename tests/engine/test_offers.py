"""What all peers have is never lost with as many nodes as there are copies, wherever workers and nodes are cut off."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest

from dtrain.engine.snapshot.decided import Copied
from dtrain.engine.snapshot.offers import Offers
from dtrain.planners.sharding.placement import place
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.slots import PEER_SLOTS, SLOTS, MemoryDir, Slot, SlotRecord


class Ranks:
    """Lets the ranks of a job say something to each other, each from a thread of its own."""

    def __init__(self, count: int) -> None:
        self.said = [b""] * count
        self.barrier = threading.Barrier(count)

    def gather(self, rank: int, mine: bytes) -> list[bytes]:
        self.said[rank] = mine
        self.barrier.wait()
        return list(self.said)


class Cluster:
    """Nodes of one worker each: the real marks on real slots, copies and states are played."""

    def __init__(self, folder: Path, nodes: int, replicas: int, every: int, chance: random.Random) -> None:
        self.nodes, self.replicas, self.every, self.chance = nodes, replicas, every, chance
        self.holders = place(nodes, replicas).holders
        self.memory = [MemoryDir(folder / str(node)) for node in range(nodes)]
        for memory in self.memory:
            memory.path.mkdir()
        self.copies: dict[tuple[int, int], list[Version]] = {}
        """By holder and owner: the newest two versions that are whole there."""
        self.attempt = self.step = 0
        self.safe: Version | None = None
        self.promised: Version | None = None
        """What the peer tier has had whole since nodes were last lost."""
        self.late: list[int] = []
        """Steps whose copies were told to be late, by one rank after the other."""
        self.start(None)

    def slots(self, node: int) -> list[Slot]:
        return self.memory[node].slots(node, self.nodes, SLOTS + PEER_SLOTS)

    def held(self, node: int) -> dict[Version, Slot]:
        return {record.version: slot for slot in self.slots(node) if (record := slot.record())}

    def start(self, restored: Version | None) -> None:
        """The workers begin, from a version in memory or from none; all else in the slots is of no more use."""
        self.attempt += 1
        self.safe, self.step = restored, restored.step if restored else 0
        for pair, kept in self.copies.items():
            self.copies[pair] = [version for version in kept if restored is not None and version <= restored]
        for node in range(self.nodes):
            if restored is not None and restored not in self.held(node):  # it comes from a copy, into an empty slot
                self.commit(next(slot for slot in self.slots(node) if slot.record() is None), restored)
        ranks = Ranks(self.nodes)

        def begin(node: int) -> Offers:
            return Offers(self.slots(node), self.every, restored, lambda mine: ranks.gather(node, mine))

        with ThreadPoolExecutor(self.nodes) as pool:
            self.offers = list(pool.map(begin, range(self.nodes)))
        for node, offers in enumerate(self.offers):
            for version, slot in self.held(node).items():
                if version != restored and not offers.keeps(version):
                    slot.invalidate()

    def train(self, cut_after: int | None = None) -> None:
        """A step: a snapshot on each rank, then all decide; with `cut_after` only so many ranks come to that."""
        self.step += 1
        version = Version(attempt=self.attempt, step=self.step)
        for node in range(self.nodes):
            self.write(node, version)
        self.safe = version
        busy = any(offers.busy() for offers in self.offers)
        for node in range(self.nodes if cut_after is None else cut_after):
            slot = self.held(node)[version]
            decided = self.offers[node].decide(version, [slot], busy=busy)
            if isinstance(decided, Copied):
                self.promised = decided.version
            elif decided is not None:
                self.late.append(decided.version.step)
        if cut_after is not None:
            self.restart()

    def write(self, node: int, version: Version) -> None:
        kept = {v for v in self.held(node) if v == self.safe or self.offers[node].keeps(v)}
        free = [slot for slot in self.slots(node) if (r := slot.record()) is None or r.version not in kept]
        assert len(free) >= 2, "one to write into, and one that the drainer may hold"
        slot = self.chance.choice(free)
        slot.invalidate()
        self.commit(slot, version)

    def commit(self, slot: Slot, version: Version) -> None:
        record = SlotRecord("r", version.step, version.attempt, slot.rank, self.nodes, slot.index, "", ())
        slot.commit(record, drain=False)

    def send(self) -> None:
        """One copy arrives somewhere, or is torn; it makes room for itself before it is whole."""
        owner = self.chance.randrange(self.nodes)
        holder = self.chance.choice(self.holders[owner])
        for version, slot in sorted(self.held(owner).items()):
            kept = self.copies.setdefault((holder, owner), [])
            if slot.offered and not slot.is_sent(version) and version not in kept:
                assert not kept or version > kept[-1], "older than what is there"
                kept[:] = kept[-1:]
                if self.chance.random() < 0.8:
                    kept.append(version)
                break
        for version, slot in self.held(owner).items():
            if slot.offered and all(version in self.copies.get((other, owner), []) for other in self.holders[owner]):
                slot.sent(version)

    def restart(self) -> None:
        """All workers are cut off; they go on from the newest version that is in every node's memory."""
        common = set.intersection(*(set(self.held(node)) for node in range(self.nodes)))
        self.start(max(common, default=None))

    def lose(self, count: int) -> None:
        """So many are lost."""
        self.lose_these(set(self.chance.sample(range(self.nodes), count)))

    def lose_these(self, lost: set[int]) -> None:
        """Nodes are lost with all that they have, empty ones take their places."""
        for node in lost:
            shutil.rmtree(self.memory[node].path)
            self.memory[node].path.mkdir()
        self.copies = {pair: kept for pair, kept in self.copies.items() if pair[0] not in lost}
        self.promised = None
        self.start(max(self.left(set()), default=None))

    def left(self, lost: set[int]) -> set[Version]:
        """Versions of which every shard is somewhere, without these nodes."""
        found = []
        for owner in range(self.nodes):
            own = set(self.held(owner)) if owner not in lost else set()
            copies = [set(self.copies.get((holder, owner), [])) for holder in self.holders[owner] if holder not in lost]
            found.append(own.union(*copies))
        return set.intersection(*found)

    def check(self) -> None:
        if self.promised is None:
            return
        for count in range(1, self.replicas + 1):
            for lost in combinations(range(self.nodes), count):
                assert max(self.left(set(lost)), default=Version(0, 0)) >= self.promised, lost


@pytest.mark.parametrize(("nodes", "replicas", "every"), [(2, 1, 1), (3, 1, 1), (3, 2, 2), (4, 2, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_a_promised_version_outlives_every_loss_that_it_is_for(
    tmp_path: Path, nodes: int, replicas: int, every: int, seed: int
) -> None:
    chance = random.Random(seed)
    cluster = Cluster(tmp_path, nodes, replicas, every, chance)
    promises = losses = 0
    for _ in range(100):
        before = cluster.promised
        event = chance.choices(["train", "send", "cut", "lose"], [4, 2 * nodes * replicas, 0.7, 0.5])[0]
        if event == "train":
            cluster.train()
        elif event == "send":
            for _ in range(4):
                cluster.send()
        elif event == "cut":
            cluster.train(cut_after=chance.randrange(nodes))
        elif cluster.promised is not None:
            promised = cluster.promised
            cluster.lose(chance.randint(1, replicas))
            assert cluster.safe is not None and cluster.safe >= promised, "at least what was promised is there"
            losses += 1
        promises += cluster.promised != before and cluster.promised is not None
        cluster.check()
    assert promises > 2
    assert losses > 0


def test_copies_are_made_as_often_as_was_asked_for_and_one_at_a_time(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, 1, 3, random.Random(1))
    offered = []
    for step in range(1, 12):
        cluster.train()
        under_way = cluster.offers[0].under_way
        offered.append(under_way.step if under_way else 0)
        if step in (4, 5, 9):
            for _ in range(20):
                cluster.send()
    assert offered == [0, 0, 3, 3, 0, 6, 6, 6, 6, 10, 10]


def test_a_copy_under_way_is_no_promise(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, 1, 1, random.Random(1))
    for _ in range(5):
        cluster.train()
    assert cluster.promised is None
    assert cluster.offers[0].under_way == Version(attempt=1, step=1)


def test_training_waits_for_a_late_copy_and_for_one_that_nobody_takes_only_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, 1, 1, random.Random(1))
    cluster.train()
    offers = cluster.offers[0]
    looks: list[bool] = []

    def alive() -> None:
        looks.append(offers.busy())
        if len(looks) > 3:
            cluster.send()

    for one in cluster.offers:
        one.patience_s = 60.0
    offers.wait(Version(attempt=1, step=2), alive)
    assert len(looks) > 3
    assert not offers.busy()
    for other in cluster.offers[1:]:
        other.wait(Version(attempt=1, step=2), cluster.send)
    cluster.train()
    assert offers.under_way == Version(attempt=1, step=2), "a promise, and the next one is on its way"
    assert cluster.promised == Version(attempt=1, step=1)
    offers.patience_s = 0.01
    looks.clear()
    offers.wait(Version(attempt=1, step=3), lambda: looks.append(True))
    assert looks
    looks.clear()
    offers.wait(Version(attempt=1, step=4), lambda: looks.append(True))
    assert not looks
    assert cluster.late == []
    cluster.train()
    cluster.train()
    assert cluster.late == [2, 2], "each rank knows, and says it once"


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_another_node_may_be_lost_before_the_attempt_has_made_a_copy_of_its_own(
    tmp_path: Path, first: int, second: int
) -> None:
    """What the job goes on from is with as many nodes again as before, though no step was finished since."""
    cluster = Cluster(tmp_path, 3, 1, 1, random.Random(first))
    for _ in range(3):
        cluster.train()
        for _ in range(40):
            cluster.send()
    promised = cluster.promised
    assert promised is not None
    for lost in (first, second):
        cluster.lose_these({lost})
        assert cluster.safe is not None and cluster.safe >= promised
        for _ in range(40):
            cluster.send()
