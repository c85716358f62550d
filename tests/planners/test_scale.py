"""A job of ten thousand nodes finds what all can go on from; storing more often, and nearer, never costs goodput."""

from __future__ import annotations

import pytest
from tests.benchmarks.scale import LOST_ZONE, NEW, NODES, OLD, all_hold, ways

from dtrain.tiers.reading.agree import Held, agreed, between_nodes
from dtrain.tiers.reading.recovery import MEMORY, Candidate
from dtrain.tiers.stores.store import Place

CANDIDATES = [Candidate(version, Place(MEMORY, "")) for version in (NEW, OLD)]


def test_ten_thousand_nodes_go_on_from_copies_of_what_a_zone_has_lost() -> None:
    held = all_hold()
    assert len(held) == NODES
    assert [one.tier for one in agreed(CANDIDATES, held)[0]] == ["memory", "memory"]
    held |= dict.fromkeys(LOST_ZONE, Held())
    assert [(one.version, one.tier) for one in agreed(CANDIDATES, held)[0]] == [(NEW, "peer"), (OLD, "peer")]
    gone = dict.fromkeys(range(NODES // 2), Held())
    assert not between_nodes(held | gone), "half of the nodes is more than 2 copies can be spread over"
    chosen, passed = agreed(CANDIDATES, held | gone)
    assert not chosen and len(passed) == 2


@pytest.mark.parametrize("per_day", [3, 100])
def test_goodput_grows_with_each_tier_and_is_what_a_played_run_comes_to(per_day: int) -> None:
    found = ways(per_day, steps=20_000)
    goodputs = [found[name].goodput for name in ("none", "stop", "disk", "memory", "peer")]
    assert goodputs == sorted(goodputs)
    for name in ("disk", "memory", "peer"):
        one = found[name]
        assert one.played is not None
        assert (1 - one.goodput) == pytest.approx(1 - one.played, abs=0.01), name
    lost = [found[name].lost_s for name in ("disk", "memory", "peer")]
    assert lost == sorted(lost, reverse=True)
