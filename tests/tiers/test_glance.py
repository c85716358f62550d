"""A list of a tier says the same as reading every manifest whole, and tells a failing place from a damaged one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.tiers import faults
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.manifest import Manifest
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading.glance import glance
from dtrain.tiers.stores.object import ObjectStore
from dtrain.tiers.stores.store import Place as Where
from dtrain.tiers.stores.store import StoreError
from dtrain.tiers.tier import Tier


def same(place: Place) -> tuple[list[int], list[int]]:
    """Steps of the good and of the unusable ones, after holding them against a whole scan."""
    good, bad = place.disk.scan()
    seen, refused = glance(place.disk)
    assert [(one.version, one.nbytes) for one in reversed(seen)] == [(c.version, c.manifest.nbytes) for c in good]
    assert [(one.version, one.where) for one in reversed(refused)] == [(one.version, one.where) for one in bad]
    return [one.version.step for one in seen], [one.version.step for one in refused]


def body_of(folder: Path) -> dict[str, object]:
    body: dict[str, object] = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    return body


def test_what_is_whole_is_listed_newest_first(place: Place) -> None:
    place.store(20)
    place.store(10)
    place.store(5, attempt=2)
    assert same(place) == ([5, 20, 10], [])


def test_every_wrong_bit_and_every_cut_of_a_manifest_is_noticed(place: Place) -> None:
    place.store(1)
    file = place.store(2) / "manifest.json"
    good = file.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 97)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        for data in (bytes(damaged), good[:position]):
            file.write_bytes(data)
            assert same(place) == ([1], [2]), position


def test_missing_and_cut_files_are_noticed(place: Place) -> None:
    for step in (1, 2, 3):
        place.store(step)
    (place.root / "step-0000000001.a0001" / "rank-00001.safetensors").unlink()
    cut = place.root / "step-0000000002.a0001" / "rank-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    assert same(place) == ([3], [2, 1])


@pytest.mark.parametrize(
    "changed", [{"format": "another"}, {"step": 3}, {"files": {}}, {"files": None}, {"attempt": "1"}, {"rng": {}}]
)
def test_a_manifest_that_is_signed_but_wrong_is_not_listed(place: Place, changed: dict[str, object]) -> None:
    folder = place.store(2)
    (folder / "manifest.json").write_bytes(Manifest(body_of(folder) | changed).to_bytes())
    assert same(place) == ([], [2])


def test_a_manifest_written_in_another_style_is_read_whole(place: Place) -> None:
    folder = place.store(2)
    text = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(text.items())), indent=2))
    assert same(place) == ([2], [])


def test_other_runs_are_left_out(place: Place) -> None:
    folder = place.store(2)
    (folder / "manifest.json").write_bytes(Manifest(body_of(folder) | {"run_id": "another"}).to_bytes())
    assert same(place) == ([], [])


def bucket(place: Place, folder: Path) -> Tier:
    folder.mkdir()
    store = ObjectStore(folder.as_uri(), {}, None)
    return Tier(Where("object", folder.as_uri()), store, RUN_ID)


def test_a_bucket_is_asked_for_several_at_once_and_answers_in_order(place: Place, tmp_path: Path) -> None:
    tier = bucket(place, tmp_path / "bucket")
    for step in range(1, 21):
        snapshot(place.memory, step)
        tier.write(*gather(place.memory, place.memory.whole()[Version(1, step)]))
    assert [one.version.step for one in glance(tier)[0]] == list(range(20, 0, -1))


def test_a_place_that_fails_meanwhile_is_not_called_damage(place: Place, tmp_path: Path) -> None:
    tier = bucket(place, tmp_path / "bucket")
    snapshot(place.memory, 1)
    tier.write(*gather(place.memory, place.memory.whole()[Version(1, 1)]))

    def fail(name: str, where: str, detail: object) -> None:
        if name == "object.get" and where.endswith("manifest.json"):
            raise StoreError("no answer")

    before = faults.watch(fail)
    try:
        with pytest.raises(StoreError):
            glance(tier)
    finally:
        faults.watch(before)
