"""`verify`: every byte in every tier is checked, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.checkpoints import Run, dtrain, flip

from dtrain.cli import verify as command
from dtrain.tiers import faults
from dtrain.tiers.recovery import Opened
from dtrain.tiers.store import Progress, StoreError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dtrain.tiers.memory.TMPFS", tmp_path)
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
            run.disk.commit.remove(opened.candidate.version, lambda: None)
        check(opened, told)

    monkeypatch.setattr(command, "check", dropped_first)
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 0
    assert sorted(state for _, _, state in states(ended.document)) == ["gone", "good"]


def test_a_store_that_fails_meanwhile_is_69_and_not_called_damage(run: Run) -> None:
    run.store_object(10)

    def fail(name: str, where: str, detail: object) -> None:
        if name == "disk.read" and where.endswith("rank-00001.safetensors"):
            raise StoreError("the bucket does not answer")

    before = faults.watch(fail)
    try:
        ended = dtrain("verify", run.run.root, "--json")
    finally:
        faults.watch(before)
    assert ended.code == 69
    assert states(ended.document) == [(10, "object", "unreachable")]


def test_an_unreachable_tier_is_69_although_the_rest_is_good(run: Run) -> None:
    run.store(10)
    run.bucket.write_text("a file where the bucket should be")
    ended = dtrain("verify", run.run.root, "--json")
    assert ended.code == 69
    assert states(ended.document) == [(10, "disk", "good")]
    assert len(ended.document["unreachable"]) == 1


def test_nothing_to_verify_is_said(run: Run) -> None:
    ended = dtrain("verify", run.run.root)
    assert ended.code == 2
    assert "no checkpoints" in ended.err
