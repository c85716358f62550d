"""Whatever lies where a checkpoint should: refused with a reason, soon, and nothing else is touched."""

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.build import Place, shard_of

from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.jsonfile import Unreadable, dumps
from dtrain.tiers.format.layout import MANIFEST, Version
from dtrain.tiers.format.manifest import parse_manifest
from dtrain.tiers.format.shardfile import MAX_HEADER, PAGE, ShardReader, parse_header
from dtrain.tiers.reading.recovery import find, open_candidate, verify

FOLDER = Version(1, 2).dirname
RANK = "rank-00000.safetensors"


def resumed(place: Place) -> tuple[list[int], list[str]]:
    """Steps whose every byte reads, and what is said of the others."""
    found = find(None, [place.disk])
    steps, said = [], [bad.reason for bad in found.rejected]
    for candidate in found.candidates:
        try:
            verify(open_candidate(candidate))
            steps.append(candidate.version.step)
        except Unreadable as error:
            said.append(str(error))
    return steps, said


def refused(place: Place) -> str:
    """Only the older checkpoint is used, and one reason is given."""
    steps, said = resumed(place)
    assert steps == [1]
    (reason,) = said
    return reason


@pytest.fixture
def newer(place: Place) -> Path:
    place.store(1)
    return place.store(2)


def test_every_cut_around_a_page_is_noticed(place: Place, newer: Path) -> None:
    for file in sorted(newer.iterdir()):
        whole = file.read_bytes()
        pages = range(0, len(whole) + 1, PAGE)
        for size in sorted({at + by for at in pages for by in (-1, 0, 1)} | {len(whole) - 1}):
            if 0 <= size < len(whole):
                file.write_bytes(whole[:size])
                assert file.name in refused(place)
        for tail in (b"\0", bytes(PAGE)):
            file.write_bytes(whole + tail)
            assert resumed(place)[0] == [1]
        file.write_bytes(whole)


def test_zeroed_pages_are_noticed(place: Place, newer: Path) -> None:
    for file in sorted(newer.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), PAGE):
            page = whole[at : at + PAGE]
            if any(page):
                file.write_bytes(whole[:at] + bytes(len(page)) + whole[at + len(page) :])
                assert resumed(place)[0] == [1], f"{file.name} at {at}"
        file.write_bytes(whole)


def test_shards_that_have_changed_places_are_noticed(place: Place, newer: Path) -> None:
    first, second = newer / RANK, newer / "rank-00001.safetensors"
    first.rename(newer / "x")
    second.rename(first)
    (newer / "x").rename(second)
    refused(place)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_link(path: Path) -> None:
    outside = path.parents[2] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("name", [MANIFEST, RANK])
@pytest.mark.parametrize("change", [as_fifo, as_folder, as_link])
def test_what_is_no_plain_file_is_not_read(
    place: Place, newer: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(newer / name)
    assert name in refused(place)


def test_a_folder_that_is_a_link_is_no_checkpoint(place: Place, newer: Path) -> None:
    outside = place.run.root / "outside"
    shutil.move(newer, outside)
    newer.symlink_to(outside)
    assert resumed(place) == ([1], [])
    place.disk.remove_leftovers()
    assert (outside / MANIFEST).exists()


def with_digest(body: Any) -> bytes:
    return dumps({**body, "digest": digest(dumps(body))})


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A manifest that is right."""
    found: dict[str, Any] = json.loads((Place(tmp_path_factory.mktemp("whole")).store(2) / MANIFEST).read_bytes())
    del found["digest"]
    return found


def test_the_manifest_itself_is_right(body: dict[str, Any]) -> None:
    assert parse_manifest(with_digest(body), FOLDER, "x").version == Version(1, 2)


NAMES = ["../x", "/etc/passwd", "a/b", "", ".", "..", "A", "x" * 65, "a\0b", "a\nb", "-x", ".hidden"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_a_manifest_is_never_a_path(body: dict[str, Any], name: str) -> None:
    changed = copy.deepcopy(body)
    changed["files"][name] = changed["files"].pop(RANK)
    with pytest.raises(Unreadable):
        parse_manifest(with_digest(changed), FOLDER, "x")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b"NaN", b'{"digest":"x"}', b'{"digest":null,"files":{}}', b"\0" * 4096, b"9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_manifest(data, FOLDER, "x")


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([-1, 2**40, 2**63, 10**30, 0.5, "../x", [[]], {"a": {}}]),
)  # fmt: skip


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in paths_of(item, (*path, key)))]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_wrong_kind_anywhere_in_a_manifest_is_refused_or_read_as_it_is(
    body: dict[str, Any], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from([found for found in paths_of(body) if found]))
    changed = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(ODD)
    with contextlib.suppress(Unreadable):
        parse_manifest(with_digest(changed), FOLDER, "x")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_wrong_kind_in_a_manifest_that_passes_ends_no_resume(
    body: dict[str, Any], data: st.DataObject, place: Place
) -> None:
    """What it is read as is compared with the files: the newer one is whole and right, or named and passed over."""
    folder = place.root / FOLDER
    if not folder.exists():
        place.store(1)
        place.store(2)
    path = data.draw(st.sampled_from([found for found in paths_of(body) if found and found != ("run_id",)]))
    (folder / MANIFEST).write_bytes(with_digest(changed_at(body, path, data.draw(ODD))))
    steps, said = resumed(place)
    assert steps[-1] == 1
    assert (len(steps), len(said)) in ((1, 1), (2, 0))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step",), 2.0), (("step",), "2"), (("attempt",), True), (("world",), 2.0), (("world",), 2**62),
        (("files", RANK, "bytes"), -1), (("files", RANK, "bytes"), 1.5), (("files", RANK, "bytes"), True),
        (("files", RANK, "bytes"), 2**70), (("files", RANK, "digest"), None), (("files", RANK, "header_digest"), "x"),
        (("files",), []), (("rng",), []), (("rng", "0", "file"), "../../x"), (("rng", "0", "tensors"), ["rng.python"]),
        (("tensors",), [[]]), (("tensors", "model.a", "shape"), [37.0, 50]),
        (("tensors", "model.a", "shape"), [-37, -50]),
        (("tensors", "model.a", "shape"), [True, 50]), (("tensors", "model.a", "shape"), [2**80, 50]),
        (("tensors", "model.a", "shape"), [1] * 1000), (("tensors", "model.a", "pieces"), {}),
        (("tensors", "model.a", "pieces", 0, "file"), "/etc/passwd"),
        (("tensors", "model.a", "pieces", 0, "digest"), 7),
        (("tensors", "model.a", "pieces", 0, "offset"), [0.0, 0]), (("data", "samples"), -1),
        (("data", "samples"), False),
        (("tensors", "model.a", "dtype"), "F3"), (("tensors", "rng.a"), {}), (("rng", "1", "file"), RANK),
        (("rng", "0", "tensors", "model.x"), "0" * 32), (("data",), None),
        (("format",), "dtrain-checkpoint-2"), (("run_id",), {}),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(Unreadable):
        parse_manifest(with_digest(changed_at(body, path, value)), FOLDER, "x")


def changed_at(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    found: dict[str, Any] = changed
    return found


def test_a_key_that_is_there_twice_is_refused(body: dict[str, Any]) -> None:
    text = b'{"step":3,' + dumps(body)[1:]  # the last one of two would be taken, without a word
    for data in (b'{"digest":"' + digest(text).encode() + b'",' + text[1:], text):
        with pytest.raises(Unreadable):
            parse_manifest(data, FOLDER, "x")


@pytest.mark.parametrize(
    "bomb", [b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"files":' + b"[" * 50_000 + b"]" * 50_000 + b"}"]
)
def test_deep_nesting_under_a_right_digest_is_refused(bomb: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_manifest(b'{"digest":"' + digest(bomb).encode() + b'",' + bomb[1:], FOLDER, "x")


def test_files_of_another_step_are_noticed(place: Place, newer: Path) -> None:
    for name in (RANK, MANIFEST):
        older = place.root / Version(1, 1).dirname / name
        whole = (newer / name).read_bytes()
        shutil.copyfile(older, newer / name)
        refused(place)
        (newer / name).write_bytes(whole)


HEADER = shard_of(0, 2).header()


@pytest.mark.parametrize(
    "sizes", [[0.5, 8], [-2, -2], [True, 4], [2**62, 2**62], [10**400, 1.5], ["4"], 4, None, [1] * 1000, [[4]]]
)
@pytest.mark.parametrize("key", ["shape", "whole", "offset", "rows", "start"])
def test_a_header_with_a_shape_that_cannot_be_is_refused(key: str, sizes: object) -> None:
    boxes = [sizes if key == "offset" else [0], sizes if key == "whole" else [4]]
    rows = [sizes if key == "start" else 0, sizes if key == "rows" else [4]]
    kind, box = ("rows", rows) if key in ("rows", "start") else ("boxes", boxes)
    table = {
        "__metadata__": {"rank": "0", "world": "1", "run_id": "x", kind: json.dumps({"a": box})},
        "a": {"dtype": "F32", "shape": sizes if key == "shape" else [4], "data_offsets": [0, 16]},
    }
    with pytest.raises(Unreadable):
        parse_header(json.dumps(table).encode(), "x")


@pytest.mark.parametrize(
    "offsets", [[0, 2**40], [0.0, 16.0], [False, 16], [-16, 0], [16, 0], ["", ""], [0], [0, 16, 32], None]
)
def test_a_header_whose_bytes_cannot_be_is_refused(tmp_path: Path, offsets: object) -> None:
    table = {
        "__metadata__": {"rank": "0", "world": "1", "run_id": "x", "rows": json.dumps({"a": [0, [4]]})},
        "a": {"dtype": "F32", "shape": [4], "data_offsets": offsets},
    }
    text = json.dumps(table).encode()
    path = tmp_path / "shard"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(Unreadable):
        ShardReader(path)


def test_a_header_that_claims_ten_million_entries_is_refused_unread(tmp_path: Path) -> None:
    """It would be longer than the file: what is claimed is held against what is there first."""
    path = tmp_path / "shard"
    path.write_bytes((10**7 * 60).to_bytes(8, "little") + b'{"a":{},' * 1000)
    with pytest.raises(Unreadable, match="longer than the file"):
        ShardReader(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_wrong_kind_anywhere_in_a_header_is_refused_or_read_as_it_is(data: st.DataObject) -> None:
    table = json.loads(HEADER[8:])
    table["__metadata__"]["boxes"] = json.loads(table["__metadata__"]["boxes"])
    path = data.draw(st.sampled_from([found for found in paths_of(table) if found]))
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(ODD)
    if isinstance(table["__metadata__"], dict) and path[:2] != ("__metadata__", "boxes"):
        table["__metadata__"]["boxes"] = json.dumps(table["__metadata__"].get("boxes"))
    with contextlib.suppress(Unreadable):
        parse_header(json.dumps(table).encode(), "x")


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER + 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_s_length_is_checked_before_it_is_believed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "shard"
    path.write_bytes(length.to_bytes(8, "little") + HEADER[8:] + bytes(5000))
    with pytest.raises(Unreadable):
        ShardReader(path)


def test_a_manifest_that_is_too_large_is_not_parsed(place: Place, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.tiers.tier.MAX_BYTES", 100)
    steps, said = resumed(place)
    assert steps == []
    assert all("larger than 100 bytes" in reason for reason in said)
