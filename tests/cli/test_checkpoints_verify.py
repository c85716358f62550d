"""`verify`: every byte in every tier is checked, and what is wrong is named."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.cli.checkpoints import Run, dtrain, flip

from dtrain.cli.checkpoints import stored
from dtrain.cli.checkpoints import verify as command
from dtrain.tiers import faults
from dtrain.tiers.reading.recovery import Opened
from dtrain.tiers.stores.object import ObjectStore
from dtrain.tiers.stores.store import Place as Where
from dtrain.tiers.stores.store import Progress, StoreError
from dtrain.tiers.tier import Tier


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.slots.TMPFS", tmp_path)
    return Run(tmp_path)


def states(told: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(row["step"], row["tier"], row["state"]) for row in told["checkpoints"]]


def test_every_tier_is_verified_with_bytes_and_speed(run: Run) -> None:
    run.store(10)
    run.store_object(10)
    run.store_memory(11)
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 0
    assert states(ended.document) == [(11, "memory", "good"), (10, "disk", "good"), (10, "object", "good")]
    for row in ended.document["checkpoints"]:
        assert row["bytes"] > 0
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
    assert dtrain("verify", run.run.root).out.count(": good, ") == 3


@pytest.mark.parametrize("position", [0, 9, 4096, -1])
@pytest.mark.parametrize("tier", ["memory", "disk", "object"])
def test_one_wrong_bit_anywhere_is_65_and_named(run: Run, tier: str, position: int) -> None:
    disk, remote, memory = run.store(10), run.store_object(10), run.store_memory(10)
    damaged = {
        "memory": memory.path / "rank-00001-of-00002.slot1",
        "disk": disk / "rank-00001.safetensors",
        "object": remote / "rank-00001.safetensors",
    }[tier]
    flip(damaged, position)
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 65
    assert {(where, state) for _, where, state in states(ended.document)} == {
        (where, "damaged" if where == tier else "good") for where in ("memory", "disk", "object")
    }
    (reason,) = [row["reason"] for row in ended.document["checkpoints"] if not row["good"]]
    assert str(damaged) in reason


def test_entries_are_held_against_the_manifest_beside_the_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.store(10)
    digests = iter([info["digest"] for info in run.disk.scan()[0][0].manifest.files.values()])
    flip(folder / "rank-00000.safetensors")
    monkeypatch.setattr(command, "digest_uncached", lambda path, told: next(digests))
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 65
    assert "does not match its digest" in ended.document["checkpoints"][0]["reason"]


def test_what_is_on_the_disk_is_read_not_what_is_in_the_cache(run: Run) -> None:
    """The file as a whole is read by the function that goes past the page cache, the entries after it."""
    run.store(10)
    seen: list[str] = []
    before = faults.watch(lambda name, where, detail: seen.append(f"{name} {Path(where).name}"))
    try:
        assert dtrain("verify", run.run.root).code == 0
    finally:
        faults.watch(before)
    assert seen.count("disk.read rank-00000.safetensors") == 2  # once for the folder's own file, once past the cache


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
def test_a_folder_named_like_a_checkpoint_that_is_not_usable_is_65(run: Run, name: str) -> None:
    run.store(10)
    (run.store(20) / name).unlink()
    ended = dtrain("verify", run.run.root)
    assert ended.code == 65
    good, bad = ended.out.splitlines()
    assert good.startswith("step 10 (attempt 1, disk): good")
    assert bad.startswith("step 20 (attempt 1, disk): DAMAGED: ")
    assert name in bad
    assert dtrain("verify", f"{run.run.root}@10").code == 0
    assert dtrain("verify", f"{run.run.root}@20").code == 65


def test_one_tier_can_be_chosen(run: Run) -> None:
    run.store(10)
    flip(run.store_object(10) / "rank-00000.safetensors")
    assert dtrain("verify", run.run.root, "--tier", "disk").code == 0
    assert dtrain("verify", run.run.root, "--tier", "object").code == 65


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_what_a_live_run_drops_meanwhile_is_no_damage(run: Run, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.store_memory(11)
    run.store(10)
    check = command.check

    def dropped_first(opened: Opened, told: Progress) -> None:
        if opened.candidate.tier == tier == "memory":
            for slot in run.own.all_slots():
                slot.invalidate()
                slot.file.write_bytes(b"the next step")
        if opened.candidate.tier == tier == "disk":
            run.disk.commit.remove(opened.candidate.version, opened.meta["files"], lambda: None)
        check(opened, told)

    monkeypatch.setattr(command, "check", dropped_first)
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 0
    assert sorted(state for _, _, state in states(ended.document)) == ["gone", "good"]


@pytest.mark.parametrize(
    ("failure", "code", "state"),
    [
        (StoreError("the bucket does not answer"), 69, "unreachable"),
        (PermissionError(errno.EACCES, "Permission denied"), 69, "unreachable"),
        (OSError(errno.ENOSPC, "No space left on device"), 69, "unreachable"),
        (OSError(errno.EIO, "Input/output error"), 65, "damaged"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 65, "damaged"),
    ],
)
def test_a_place_that_fails_is_69_and_broken_bytes_are_65(run: Run, failure: OSError, code: int, state: str) -> None:
    run.store_object(10)

    def fail(name: str, where: str, detail: object) -> None:
        if name == "disk.read" and where.endswith("rank-00001.safetensors"):
            raise failure

    before = faults.watch(fail)
    try:
        ended = dtrain("verify", run.run.root, "--json")
    finally:
        faults.watch(before)
    assert ended.code == code
    assert states(ended.document) == [(10, "object", state)]


def test_an_unreachable_tier_is_69_although_the_rest_is_good(run: Run) -> None:
    run.store(10)
    run.bucket.write_text("a file where the bucket should be")
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 69
    assert states(ended.document) == [(10, "disk", "good")]
    assert len(ended.document["unreachable"]) == 1


@pytest.mark.parametrize("command", ["verify", "inspect", "export"])
def test_a_run_without_a_checkpoint_has_nothing_usable(run: Run, tmp_path: Path, command: str) -> None:
    ended = dtrain(command, run.run.root, *([tmp_path / "out"] if command == "export" else []))
    assert ended.code == 65
    assert "no checkpoints" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_bucket_is_read_through_one_copy_that_goes_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_bucket(place: Where, run_id: str | None, spool: Path | None, home: Path) -> Tier:
        return Tier(place, ObjectStore(place.url, {}, spool), run_id, home=home)

    run.write_spec({"type": "object", "url": run.bucket.as_uri()})
    folder = run.store_object(10)
    monkeypatch.setattr(stored, "open_tier", open_bucket)
    fetched: list[str] = []
    before = faults.watch(
        lambda name, where, detail: fetched.append(Path(where).name) if name == "object.get" else None
    )
    try:
        assert dtrain("verify", run.run.root).code == 0
        assert sorted(name for name in fetched if name.startswith("rank-")) == [
            "rank-00000.safetensors", "rank-00001.safetensors",
        ]  # fmt: skip
        assert dtrain("export", run.run.root, tmp_path / "out").code == 0
    finally:
        faults.watch(before)
    flip(folder / "rank-00001.safetensors")
    assert dtrain("verify", run.run.root).code == 65
    assert not list(run.run.root.glob("spool*/*.safetensors"))
