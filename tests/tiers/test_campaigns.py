"""The long trials of the storage, in short: they run, they count, and they find nothing."""

from pathlib import Path

import pytest
from tests.campaigns import bit_flips, kill_storage

from dtrain.tiers.format.layout import Version


def test_killed_writers_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    tallies = kill_storage.campaign(36, 11, tmp_path)
    assert [tally.kills for tally in tallies.values()] == [15, 18, 3]
    assert sum(tally.committed for tally in tallies.values()) > 0
    assert sum(tally.checked for tally in tallies.values()) > 0
    assert [words for tally in tallies.values() for words in tally.lost + tally.wrong] == []


def test_the_kill_loop_sees_what_is_lost_and_what_is_wrong(tmp_path: Path) -> None:
    ground = kill_storage.Ground("rename", tmp_path / "place", tmp_path / "memory")
    folder = ground.place.store(1)
    ground.check({Version(1, 1), Version(1, 2)})
    assert len(ground.tally.lost) == 1
    assert "step 2" in ground.tally.lost[0]
    bit_flips.flip(folder / "rank-00000.safetensors", 8 * 5000)
    ground.check(set())
    assert ground.tally.wrong


def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    result = bit_flips.campaign(300, 5, tmp_path / "place")
    assert result.wrong == []
    assert result.detected["data"] == 100


def test_the_flips_see_what_goes_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.tiers.reading.recovery.digest", lambda data: _Anything())
    assert bit_flips.campaign(30, 5, tmp_path / "place").wrong


class _Anything(str):
    """Equal to every digest, as if nobody looked."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__
