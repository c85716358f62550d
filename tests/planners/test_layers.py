"""Rows of modules divided into the stages of a pipeline."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from dtrain.planners.sharding.layers import runs_of_stages


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_division_has_a_lighter_heaviest_run(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    runs = runs_of_stages(weights, stages)
    assert len(runs) == stages
    assert all(runs)
    assert [item for run in runs for item in run] == list(range(len(weights)))
    possible = (pairwise([0, *inner, len(weights)]) for inner in combinations(range(1, len(weights)), stages - 1))
    best = min(max(sum(weights[a:b]) for a, b in edges) for edges in possible)
    assert max(sum(weights[i] for i in run) for run in runs) == best


def test_as_many_modules_as_stages_are_a_stage_each() -> None:
    assert runs_of_stages([1, 100, 1, 1], 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
