"""Micro-batches: the same samples per step for every world size."""

import pytest
import torch
from tests.engine.build import points

from dtrain.engine.data.build import Batches, build_samples
from dtrain.engine.data.order import samples_at
from dtrain.engine.data.text import DataError
from dtrain.engine.entry import UserCodeError
from dtrain.specs.datasets import PythonDataset

GLOBAL = 16


def batches(rank: int = 0, world: int = 1, micro: int = 4, samples: int = 50, seed: int = 7) -> Batches:
    return Batches(points(samples), seed=seed, global_batch=GLOBAL, micro_batch=micro, rank=rank, world=world)


def taken(seen: int, world: int, micro: int) -> list[list[int]]:
    """Samples of one step, rank by rank."""
    ranks = [batches(rank, world, micro) for rank in range(world)]
    return [[i for m in range(GLOBAL // (micro * world)) for i in one.sample_ids(seen, m)] for one in ranks]


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (1, 16), (2, 4), (2, 8), (4, 4), (4, 2), (16, 1)])
def test_a_step_has_the_same_samples_whatever_the_world(world: int, micro: int) -> None:
    for seen in range(0, 12 * GLOBAL, GLOBAL):
        ranks = taken(seen, world, micro)
        assert sorted(i for one in ranks for i in one) == sorted(samples_at(seen, GLOBAL, 50, 7))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_no_sample_within_an_epoch(world: int) -> None:
    ranks = taken(0, world, 4)
    assert sum(len(set(one)) for one in ranks) == len(set().union(*ranks)) == GLOBAL


def test_row_80_an_epoch_is_covered_when_every_step_begins_anew() -> None:
    """Row 80: a run killed after every step, its world changed at each restart."""
    seen: list[int] = []
    for step in range(25):
        world = (1, 2, 4)[step % 3]
        seen += [i for one in taken(step * GLOBAL, world, 4) for i in one]
    stream = samples_at(0, 25 * GLOBAL, 50, 7)
    assert sorted(seen) == sorted(stream)
    assert all(stream.count(i) == 25 * GLOBAL // 50 for i in range(50))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_row_83_every_rank_has_as_many_full_passes_whatever_the_data_divide_by(world: int) -> None:
    """509 samples are no multiple of anything: the stream has no end at which one rank would have a batch more."""
    ranks = [batches(rank, world, 4, samples=509) for rank in range(world)]
    for step in range(2 * 509 // GLOBAL):
        passes = [[len(one.sample_ids(step * GLOBAL, m)) for m in range(GLOBAL // (4 * world))] for one in ranks]
        assert passes == [[4] * (GLOBAL // (4 * world))] * world


def test_the_batch_holds_the_samples_in_their_order() -> None:
    one = batches(rank=1, world=2)
    assert torch.equal(one.get(32, 1), points(50).values[one.sample_ids(32, 1)])


@pytest.mark.parametrize("samples", [1, 15])
def test_row_82_less_data_than_a_batch_is_refused(samples: int) -> None:
    """Row 82: no epoch of zero steps."""
    with pytest.raises(DataError, match=rf"has {samples} samples, fewer than training.global_batch_size 16"):
        batches(samples=samples)


def test_as_much_data_as_a_batch_is_enough() -> None:
    one = batches(samples=16, micro=16)
    assert sorted(one.sample_ids(0, 0)) == sorted(one.sample_ids(16, 0)) == list(range(16))


def test_the_fingerprint_follows_the_length() -> None:
    assert batches(samples=50).fingerprint() == batches(samples=50, seed=8).fingerprint()
    assert batches(samples=50).fingerprint() != batches(samples=51).fingerprint()


def entry(name: str) -> PythonDataset:
    return PythonDataset(type="python", entry=f"tests.engine.test_batches:{name}")


def nothing() -> None:
    """An entry that returns no data set."""


def bare() -> object:
    """An entry whose data set has no length."""
    return iter([1, 2])


def test_data_of_ones_own() -> None:
    assert (
        len(build_samples(PythonDataset(type="python", entry="tests.engine.build:points", kwargs={"samples": 9}))) == 9
    )
    for name, kind in (("nothing", "NoneType"), ("bare", "list_iterator")):
        with pytest.raises(UserCodeError, match=f"returned {kind}, it must have __len__"):
            build_samples(entry(name))
