from __future__ import annotations

import itertools
from collections import Counter

import pytest

from dtrain.planners.compare import (
    Block,
    block_from_json,
    compare,
    median_interval,
    order,
    rounds_that_fit,
    steps_that_suit,
)
from dtrain.planners.methods import METHODS, PLAIN, UnknownMethod, choose

NAMES = ["dtrain", "torch-save", "dcp", "dcp-async-thread", "dcp-async-process"]


def block(method: str, step_s: float, *, blocked_s: float = 0.0, cpu_s: float = 1.0, disk_saves: int = 0) -> Block:
    return Block(method, step_s, blocked_s, 0.1, cpu_s, 4, 400, 40, disk_saves)


@pytest.mark.parametrize("count", range(1, 13))
def test_the_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """Every way in which `count` values may fall below or above the true median, which is 0 here, is equally likely."""
    inside = 0
    for signs in itertools.product((-1, 1), repeat=count):
        values = [sign * (place + 1) for place, sign in enumerate(signs)]
        found = median_interval(values)
        inside += found.low < 0 < found.high
    assert median_interval(list(range(count))).coverage == pytest.approx(inside / 2**count)


@pytest.mark.parametrize(("count", "low", "high"), [(5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (30, 9, 20)])
def test_the_interval_is_as_narrow_as_its_confidence_allows(count: int, low: int, high: int) -> None:
    """Places as in tables of the sign test (two-sided, 5 %)."""
    found = median_interval([float(value) for value in reversed(range(count))])
    assert (found.low, found.high) == (low, high)
    assert (found.coverage >= 0.95) is (count >= 6)


def test_one_value_claims_nothing() -> None:
    found = median_interval([1.25])
    assert (found.median, found.low, found.high, found.coverage) == (1.25, 1.25, 1.25, 0.0)


@pytest.mark.parametrize("count", range(1, 6))
def test_each_round_has_each_method_once_with_a_plain_block_on_one_side(count: int) -> None:
    names = NAMES[:count]
    for number in range(2 * count):
        sequence = [PLAIN, *order(names, number)]
        assert Counter(name for name in sequence if name != PLAIN) == Counter(names)
        assert sequence[-1] == PLAIN
        for place, name in enumerate(sequence):
            assert name == PLAIN or PLAIN in (sequence[place - 1], sequence[place + 1])


def test_neighbouring_rounds_run_in_opposite_directions_and_places_move_on() -> None:
    rounds = [[name for name in order(NAMES, number) if name != PLAIN] for number in range(2 * len(NAMES))]
    for there, back in zip(rounds[::2], rounds[1::2], strict=True):
        assert there == back[::-1]
    assert {names[0] for names in rounds[::2]} == set(NAMES)


def test_without_methods_a_round_is_empty() -> None:
    assert order([], 3) == []


def test_a_machine_that_drifts_does_not_count() -> None:
    """Each block is 2 % slower than the one before, over all by a factor of 17; the ratio stays."""
    sequence = [PLAIN, *(name for number in range(24) for name in order(NAMES[:4], number))]
    factor = {PLAIN: 1.0, "dtrain": 1.03, "torch-save": 1.35, "dcp": 1.8, "dcp-async-thread": 1.5}
    blocks = [block(name, 0.8 * 1.02**place * factor[name]) for place, name in enumerate(sequence)]
    assert blocks[-1].step_s > 15 * blocks[0].step_s
    for found in compare(blocks):
        assert found.step_ratio.median == pytest.approx(factor[found.method], rel=0.003)
        assert found.step_ratio.low < factor[found.method] < found.step_ratio.high


def test_figures_of_one_method() -> None:
    blocks = [
        block(PLAIN, 1.0, cpu_s=4.0),
        block("torch-save", 1.5, blocked_s=0.4, cpu_s=6.0, disk_saves=4),
        block(PLAIN, 1.2, cpu_s=4.8),
    ]
    (found,) = compare(blocks)
    assert found.step_ratio.median == pytest.approx(1.5 / 1.1)
    assert found.step_after_ratio == pytest.approx(1.1 / 1.1)
    assert found.blocked_s == 0.4
    assert found.cpu_s == pytest.approx(6.0 / 4 - 4.4 / 4)
    assert (found.saves, found.disk_saves, found.memory_bytes, found.disk_bytes) == (4, 4, 100, 10)


def test_methods_come_in_the_order_of_the_table_and_only_those_that_ran() -> None:
    blocks = [block(name, 1.0) for name in (PLAIN, "dcp", "dtrain", PLAIN)]
    assert [found.method for found in compare(blocks)] == ["dtrain", "dcp"]
    assert compare([block(PLAIN, 1.0)]) == []


def test_a_block_survives_its_line() -> None:
    one = block("dcp", 1.0, blocked_s=0.5)
    assert block_from_json({**one.to_json(), "what": "block", "round": 3}) == one


def test_time_is_kept() -> None:
    assert [steps_that_suit(step_s) for step_s in (0.001, 0.25, 0.8, 30.0)] == [10, 4, 1, 1]
    assert [rounds_that_fit(round_s, 80.0) for round_s in (0.1, 8.0, 60.0)] == [30, 10, 6]
    assert median_interval([1.0] * rounds_that_fit(1e9, 80.0)).coverage >= 0.95


def test_which_methods_are_measured() -> None:
    assert choose(None, ["memory", "disk"]) == tuple(
        name for name in METHODS if name not in ("null", "torch-save-fsync")
    )
    assert choose(None, ["memory"])[:2] == ("dtrain", "torch-save")
    assert choose(None, []) == ("torch-save", "dcp", "dcp-async-thread", "dcp-async-process")
    assert choose(" dcp ,torch-save-fsync,plain,dcp", []) == ("dcp", "torch-save-fsync")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("dcp,pikle", "'pikle'"), ("", "names nothing"), ("plain", "names nothing"), ("dtrain-disk", "no disk tier")],
)
def test_a_method_that_cannot_be_measured_is_named(wanted: str, words: str) -> None:
    with pytest.raises(UnknownMethod, match=words) as refused:
        choose(wanted, ["memory"])
    assert "disk" in words or all(name in str(refused.value) for name in METHODS)
