"""Export: the weights as other tools read them, the same bytes, and never half a folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize, safe_open
from tests.tiers import build
from tests.tiers.build import TENSORS, Place, digest_of, value_of

from dtrain.planners.sharding.shards import TensorInfo
from dtrain.tiers import faults
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.lock import FolderLock, Locked
from dtrain.tiers.reading import export as room
from dtrain.tiers.reading.export import INDEX, NOTE, SINGLE, Exported, export, plan
from dtrain.tiers.reading.recovery import find, in_memory, open_candidate
from dtrain.tiers.reading.whole import Facts, facts_of

BIG = 2**40


def exported(place: Place, out: Path, max_shard_bytes: int = BIG, **meta: Any) -> Exported:
    opened = open_candidate(find(None, [place.disk]).candidates[0])
    opened.meta.update(meta)
    return export(opened, out, max_shard_bytes, {"step": 10})


def stored(step: int) -> dict[str, bytes]:
    return {info.name.removeprefix("model."): value_of(info, step) for info in TENSORS}


def loaded(out: Path) -> dict[str, bytes]:
    """Every tensor by safetensors' own reader, over the index where there is one."""
    names = {SINGLE}
    if (out / INDEX).exists():
        index = json.loads((out / INDEX).read_text())
        names = set(index["weight_map"].values())
        for name, file in index["weight_map"].items():
            with safe_open(out / file, framework="numpy") as opened:
                assert name in opened.keys()  # noqa: SIM118
    read: Any = deserialize  # it has no types
    found: dict[str, bytes] = {}
    for name in names:
        with safe_open(out / name, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= {tensor: bytes(info["data"]) for tensor, info in read((out / name).read_bytes())}
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("max_shard_bytes", [BIG, 8000, 1])
def test_safetensors_reads_the_stored_bytes(place: Place, tmp_path: Path, world: int, max_shard_bytes: int) -> None:
    place.store(10, world=world)
    done = exported(place, tmp_path / "out", max_shard_bytes)
    assert loaded(tmp_path / "out") == stored(10)
    assert done.tensors == len(TENSORS)
    assert done.tensor_bytes == sum(info.nbytes for info in TENSORS)
    assert {name: (tmp_path / "out" / name).stat().st_size for name in done.files} == done.files


def test_one_file_has_no_index_and_several_have_one_as_hugging_face_writes_it(place: Place, tmp_path: Path) -> None:
    place.store(10)
    exported(place, tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == [NOTE, SINGLE]
    exported(place, tmp_path / "two", 10_004)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(os.listdir(tmp_path / "two")) == sorted([NOTE, *shards, INDEX])
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": sum(info.nbytes for info in TENSORS)},
        "weight_map": {"a": shards[0], "b": shards[1], "empty": shards[1], "scalar": shards[1]},
    }


def test_no_file_is_larger_than_asked_unless_a_tensor_is() -> None:
    weights = {f"t{number:02d}": Facts("F32", (number,), 1) for number in range(1, 30)}
    for limit in (1, 40, 100, 400, 10**6):
        for file in plan(weights, limit):
            nbytes = sum(weights[name].nbytes for name in file.positions)
            assert nbytes <= limit or len(file.positions) == 1
        assert sorted(name for file in plan(weights, limit) for name in file.positions) == sorted(weights)


def test_every_tensor_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    weights = {"a": Facts("U8", (3,), 1), "b": Facts("F64", (2,), 1), "c": Facts("BF16", (5,), 1)}
    (file,) = plan(weights, BIG)
    assert file.positions["b"] % 8 == 0
    assert file.positions["c"] % 2 == 0
    (tmp_path / "x.safetensors").write_bytes(file.header + bytes(file.nbytes - len(file.header)))
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as opened:
        assert sorted(opened.keys()) == ["a", "b", "c"]


def test_the_note_says_where_the_weights_are_from(place: Place, tmp_path: Path) -> None:
    place.store(10)
    exported(place, tmp_path / "out", ties={"model.head": "model.a"})
    note = json.loads((tmp_path / "out" / NOTE).read_text())
    assert note["step"] == 10
    assert note["state_digest"] == digest_of(open_candidate(find(None, [place.disk]).candidates[0]))
    assert note["tied"] == {"head": "a"}
    assert set(note["files"]) == {SINGLE}
    assert "head" not in loaded(tmp_path / "out"), "a tied tensor is stored once"


def test_a_snapshot_in_memory_gives_the_same_files(place: Place, tmp_path: Path) -> None:
    place.store(10)
    exported(place, tmp_path / "one")
    export(open_candidate(in_memory(place.memory)[0]), tmp_path / "two", BIG, {"step": 10})
    assert (tmp_path / "one" / SINGLE).read_bytes() == (tmp_path / "two" / SINGLE).read_bytes()


def test_optimizer_state_and_random_states_stay_behind(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = [TensorInfo("optimizer.a.exp_avg", "F32", (37, 50)), TensorInfo("optimizer.a.step", "F32", ())]
    monkeypatch.setattr(build, "TENSORS", [*TENSORS, *moments])
    place.store(10)
    exported(place, tmp_path / "out")
    assert loaded(tmp_path / "out") == stored(10)


@pytest.mark.parametrize("position", [20, 4096, 5000, -1])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_wrong_bit_and_nothing_is_written(place: Place, tmp_path: Path, rank: int, position: int) -> None:
    file = place.store(10) / f"rank-{rank:05d}.safetensors"
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(Unreadable):
        exported(place, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


@contextmanager
def failing_at(number: int, code: int) -> Iterator[list[str]]:
    """Let the change of the given number fail; gives the changes seen."""
    seen: list[str] = []

    def watcher(name: str, where: str, detail: object) -> None:
        if name != "disk.read":
            seen.append(name)
            if len(seen) == number:
                raise OSError(code, os.strerror(code), where)

    before = faults.watch(watcher)
    try:
        yield seen
    finally:
        faults.watch(before)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_whatever_change_fails_nothing_is_left(place: Place, tmp_path: Path, code: int) -> None:
    place.store(10)
    before = sorted(os.listdir(tmp_path))
    with failing_at(0, code) as seen:
        exported(place, tmp_path / "whole", 8000)
    assert {"disk.create", "disk.write", "disk.sync", "disk.rename", "disk.sync_dir"} <= set(seen)
    for number in range(1, len(seen) + 1):
        with failing_at(number, code), pytest.raises(OSError, match=os.strerror(code)) as caught:
            exported(place, tmp_path / "out", 8000)
        if code == errno.ENOSPC:
            assert "the export needs" in str(caught.value)
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "whole"]), f"change {number}: {seen[number - 1]}"


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.store(10)
    monkeypatch.setattr(room, "_free", lambda folder: 1000)
    with failing_at(0, 0) as seen, pytest.raises(OSError, match=r"needs \d+ bytes, free there: 1000"):
        exported(place, tmp_path / "out")
    assert seen == []
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing(place: Place, tmp_path: Path) -> None:
    place.store(10)
    before = sorted(os.listdir(tmp_path))

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    opened = open_candidate(find(None, [place.disk]).candidates[0])
    with pytest.raises(KeyboardInterrupt):
        export(opened, tmp_path / "out", BIG, {}, interrupted)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_is_used(place: Place, tmp_path: Path) -> None:
    place.store(10)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    (tmp_path / "file").write_text("keep me")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError):
            exported(place, tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    exported(place, tmp_path / "empty")
    assert loaded(tmp_path / "empty") == stored(10)


def test_what_a_killed_export_left_is_used_again_and_a_live_one_refuses(place: Place, tmp_path: Path) -> None:
    place.store(10)
    half = tmp_path / ".out.dtrain-export"
    half.mkdir()
    (half / "model-00001-of-00009.safetensors").write_bytes(b"half")
    with FolderLock(half), pytest.raises(Locked):
        exported(place, tmp_path / "out")
    assert half.exists()
    exported(place, tmp_path / "out")
    assert not half.exists()
    assert sorted(os.listdir(tmp_path / "out")) == [NOTE, SINGLE]


def test_facts_are_the_same_from_the_manifest_and_from_the_headers(place: Place) -> None:
    place.store(10, world=3)
    disk = facts_of(open_candidate(find(None, [place.disk]).candidates[0]))
    assert facts_of(open_candidate(in_memory(place.memory)[0])) == disk
    assert disk["model.a"].nbytes == 37 * 50 * 4
