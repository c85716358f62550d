"""The order of samples: a bijection per epoch, and nothing to replay after a restart."""

from collections import Counter

import numpy as np
import pytest

from dtrain.engine.data.order import permute, samples_at

POWERS = [2**k + d for k in (2, 3, 4, 5, 8, 10, 11, 16) for d in (-1, 0, 1)]


def order(size: int, seed: int = 7, epoch: int = 0) -> list[int]:
    return permute(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, *POWERS, 100_003])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**63 - 1, 10**6)])
def test_every_sample_once_for_any_size(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


def test_no_samples_have_no_order() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        permute(np.arange(0, dtype=np.uint64), 0, 0, 0)


def test_an_index_goes_where_it_goes_whatever_is_asked_beside_it() -> None:
    whole = order(1000)
    assert [permute(np.array([i], dtype=np.uint64), 1000, 7, 0).tolist()[0] for i in range(0, 1000, 37)] == whole[::37]


def test_the_order_differs_by_seed_and_by_epoch() -> None:
    orders = {tuple(order(64, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_the_order_looks_drawn() -> None:
    """Fixed points and kept neighbours: about one each in a drawn order, hundreds in a weak one."""
    for seed in range(5):
        mixed = np.array(order(100_003, seed))
        assert (mixed == np.arange(len(mixed))).sum() < 10
        assert (np.diff(mixed) == 1).sum() < 15
        assert abs(np.corrcoef(mixed, np.arange(len(mixed)))[0, 1]) < 0.02


def test_orders_of_epochs_that_follow_each_other_are_unrelated() -> None:
    """Where a run of 32 neighbours lies this epoch must not follow from where every 32nd sample lay in the last."""
    size, side = 1024, 32
    before, after = np.array(order(size, 7, 4)), np.array(order(size, 7, 5))
    related = 0
    for chunk in range(side):
        coarse_after = Counter((after[chunk * side : (chunk + 1) * side] // side).tolist())
        fine_before = Counter((before[chunk::side] % side).tolist())
        related += coarse_after == fine_before
    assert related == 0, f"{related} of {side} runs are the epoch before in other words"


@pytest.mark.parametrize("size", [1, 5, 20, 33])
def test_each_epoch_has_every_sample_once_across_its_borders(size: int) -> None:
    stream = samples_at(0, 4 * size, size, seed=7)
    for epoch in range(4):
        assert stream[epoch * size : (epoch + 1) * size] == order(size, 7, epoch)


@pytest.mark.parametrize("size", [5, 20, 33])
def test_rows_78_79_80_begun_anywhere_it_is_the_tail_of_the_whole(size: int) -> None:
    """Rows 78 to 80: no order of epoch 0 after a resume, nothing skipped, nothing seen twice."""
    stream = samples_at(0, 5 * size, size, seed=7)
    for first in range(3 * size):
        for count in (0, 1, size - 1, 2 * size):
            assert samples_at(first, count, size, seed=7) == stream[first : first + count]
